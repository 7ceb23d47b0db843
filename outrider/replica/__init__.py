"""The code that draft and target replicas share: queue, batches, steps, and process set-up."""
