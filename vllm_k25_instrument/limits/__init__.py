"""Physical limits: what a step cannot be faster than, from the model's dimensions and the GPU's data sheet."""
