"""Log-probabilities and gradients of whole trees."""
