"""The gateway: agents run episodes over HTTP, by the APIs of OpenAI and Anthropic."""
