"""The coordinator on HTTP, as OpenAI's clients call it.

| module | what it does |
| --- | --- |
| `server.py` | listens, inside the coordinator's own event loop, and ends as the gRPC server does |
| `app.py` | the routes, and the one place that asks who calls |
| `bodies.py`, `unserved.py`, `output_format.py` | what a request may hold, and what is refused |
| `translation.py`, `chat.py`, `completions.py` | a body as requests of the coordinator |
| `running.py`, `streaming.py` | the requests' events, for as long as the client is there |
| `answers.py`, `logprobs.py`, `speculation.py` | events as an answer, whole or in chunks |
| `errors.py` | every error in OpenAI's shape |

Nothing is checked here that the coordinator checks (`coordinator/requests/validation.py`); its
errors name its own fields, which are named anew for HTTP.
"""
