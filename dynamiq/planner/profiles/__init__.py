"""What a plan is made from: clusters, trainings and gradients, measured or assumed."""
