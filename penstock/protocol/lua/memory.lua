-- memory: request that the engines of a model offload memory (trainer or operator).
-- KEYS: memory:MODEL
-- ARGV: prefix, record of the request
-- Returns: id of the entry
-- Atomic because the newest entry is the complete request: readers need no other.
local memory_key = KEYS[1]
local prefix, wish = ARGV[1], ARGV[2]

freeing(prefix)
local id = redis.call('XADD', memory_key, 'MAXLEN', '~', 16, '*', 'w', wish)
count(prefix, 'memory_wishes')
return id
