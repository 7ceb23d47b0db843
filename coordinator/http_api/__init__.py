"""The coordinator on HTTP, as OpenAI's clients call it.

| module | what it does |
| --- | --- |
| `server.py` | listens, inside the coordinator's own event loop |
| `app.py` | the routes, and the requests' events, for as long as the client is there |
| `reading.py` | reads bodies, within limits; every error in OpenAI's shape |
| `bodies.py` | what a body may hold, and the coordinator's requests that it stands for |
| `tools.py` | the tools of a body, and what holds an answer to them |
| `tool_parsers.py` | what of an answer's text is content, reasoning, or a call |
| `answers.py` | events as an answer, whole or in chunks |
| `schemas.py` | what answers look like, for the OpenAPI document |
| `tokens.py` | prompts as tokens, and back |
| `responses.py` | OpenAI's Responses: their body as one of chat, and their answer |

Nothing is checked here that the coordinator checks (`coordinator/requests/validation.py`); its
errors name its own fields, which are renamed for HTTP.
"""
