"""The coordinator on HTTP, as OpenAI's clients call it.

| module | what it does |
| --- | --- |
| `server.py`, `connections.py` | listen, inside the coordinator's own event loop |
| `app.py` | the routes, and the one place that asks who calls |
| `reading.py`, `bodies.py` | what a request may hold, and what is refused |
| `translation.py` | a body as requests of the coordinator |
| `serving.py` | the requests' events, for as long as the client is there |
| `answers.py` | events as an answer, whole or in chunks |
| `errors.py` | every error in OpenAI's shape |

Nothing is checked here that the coordinator checks (`coordinator/requests/validation.py`); its
errors name its own fields, which are renamed for HTTP.
"""
