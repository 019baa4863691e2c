"""What is known of a step as a whole: losses, learning rates, gradient norms, updates, the batch."""
