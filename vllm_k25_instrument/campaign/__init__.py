"""The measuring campaign: load, profiles and micro-benchmarks as resumable steps, and the table they add up to."""
