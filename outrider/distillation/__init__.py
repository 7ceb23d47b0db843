"""Makes a drafter for a target: corpus, teacher, student, training, card."""
