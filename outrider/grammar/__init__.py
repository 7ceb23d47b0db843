"""Constraints on a completion: a JSON schema, any JSON object, a regular expression, or choices.

| file | content | needs |
| --- | --- | --- |
| `constraint.py` | a constraint as a value, for requests, messages and the store | nothing |
| `token_mask.py` | token masks, and the interface of objects that compute them | numpy |
| `compiler.py` | compiled constraints, cached by tenant and digest | llguidance |
| `matcher.py` | the masks for the completion of each session | llguidance |

Nothing here needs torch: `outrider.speculation.logits_processing` applies masks to logits.
"""
