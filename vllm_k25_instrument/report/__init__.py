"""StepSamples -> breakdown -> tables, Markdown, HTML and JSON."""
