"""Who may call: keys and what each allows, their limits, certificates of services."""
