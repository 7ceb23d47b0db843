"""What a fleet of replicas is: who is there, who has which session, how many there should be."""
