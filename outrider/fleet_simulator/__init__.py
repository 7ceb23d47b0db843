"""A fleet of any size on a clock of its own: what it serves, how fast, and what a loss costs. Pure.

    scenario     replicas, load, times, acceptance, losses          scenario.py, draws.py
    agenda       events in order of time                            agenda.py
    stations     replicas: what waits, and the step that runs       stations.py, looking.py
    places       which replicas a session has                       places.py
    rounds       sessions on their way from station to station      rounds.py
    simulation   requests and losses                                simulation.py
    figures      what came of them                                  recording.py, figures.py
    sizing       the smallest fleet that keeps a time per token     sizing.py

Nothing here knows what a step costs or where a session goes: times are those of
`outrider.planning.round_times`, parts of prompts those of `outrider.replica.token_budget`, places
those of `outrider.registry.affinity`.
"""
