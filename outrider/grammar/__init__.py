"""Constraints on a completion: a JSON schema, any JSON object, a regular expression, or choices.

| file | content | needs |
| --- | --- | --- |
| `constraint.py` | a constraint as a value, for requests, messages and the store | nothing |
| `token_mask.py` | which tokens may follow: masks, and the interface that gives them | numpy |
| `compiler.py` | compiled constraints, cached by tenant and digest | llguidance |
| `matcher.py` | what may follow the tokens so far | llguidance |

Nothing here needs torch: `outrider.speculation.logits_processing` applies masks to logits.
"""
