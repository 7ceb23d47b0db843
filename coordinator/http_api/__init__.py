"""The coordinator's HTTP API, which is compatible with OpenAI's clients.

| module | purpose |
| --- | --- |
| `server.py` | the server, in the coordinator's event loop |
| `app.py` | the routes, and the responses with generated text |
| `incoming.py` | takes in bodies, within limits on bytes, time and connections |
| `body_route.py` | admits requests with a body, and validates long bodies in steps |
| `reading.py` | parses bodies within limits, and writes errors in OpenAI's form |
| `bodies.py` | the fields of bodies, and their translation into the coordinator's requests |
| `tools.py` | reads tools, and splits an answer's text into content, reasoning and calls |
| `answers.py` | turns the events of sessions into answers, whole or in chunks |
| `responses.py` | OpenAI's Responses API: its body and its answers |
| `schemas.py` | the types of answers, from which the OpenAPI document is made |
| `progress.py` | resumed streams and repeated requests |
| `gateway.py` | a proxy that resumes streams for its clients |
| `page/` | the files of the window (docs/window.md) |

The fields of `SamplingParams` and `GenerateRequest` state their limits in their types. The bodies
have the same types, so pydantic checks these limits. `coordinator/requests/validation.py` checks
what depends on the model. In its errors, the body's fields have the names in
`GenerateRequest.names`.
"""
