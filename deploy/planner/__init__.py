"""What drafting would bring, before anything is deployed (`outrider plan`)."""
