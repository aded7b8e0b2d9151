"""SGLang: its servers, and the client that draws from one."""
