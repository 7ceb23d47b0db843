"""What draft and target replicas share: queue, batches, steps, and the process around them."""
