"""The gateway: OpenAI's and Anthropic's APIs in front of a policy, so that a program that calls a model can be trained as it is.

`tree` keeps what a session's requests have in common, as messages and as token ids, and makes trajectories of it. `service`
answers requests: it renders prompts, asks an engine and reads its tokens. `openai_chat`, `openai_responses` and `anthropic` translate
between these APIs and the service; `server` is HTTP.
"""
