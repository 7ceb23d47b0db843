"""What drafting would bring, before anything is deployed. Pure: values in, values out."""
