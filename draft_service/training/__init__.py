"""Makes a drafter for a target: corpus, the target's answers, training, model card."""
