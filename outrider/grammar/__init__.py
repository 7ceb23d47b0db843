"""What a completion must look like: a JSON schema, any JSON object, a regular expression, a choice.

| file | what it has | needs |
| --- | --- | --- |
| `constraint.py` | the value that a request, the wire and the store have | nothing |
| `token_mask.py` | which tokens may follow: masks, and who knows them | numpy |
| `compiler.py` | compiled constraints, kept by tenant and digest | llguidance |
| `matcher.py` | what the tokens so far allow | llguidance |

Nothing here needs torch: `outrider.speculation.logits_processing` brings masks to logits.
"""
