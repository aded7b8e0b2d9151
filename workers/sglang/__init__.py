"""SGLang: its servers, and the client that generates with one."""
