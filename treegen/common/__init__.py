"""What any room may use: devices, numbers as text, and how handles on a model behave."""
