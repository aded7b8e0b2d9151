-- memory: say which memory the engines of a model are to do without (trainer or operator).
-- KEYS: memory:MODEL
-- ARGV: prefix, record of the wish
-- Returns: id of the entry
-- Atomic because the newest entry is the whole truth: who reads it needs no other.
local memory_key = KEYS[1]
local prefix, wish = ARGV[1], ARGV[2]

freeing(prefix)
local id = redis.call('XADD', memory_key, 'MAXLEN', '~', 16, '*', 'w', wish)
count(prefix, 'memory_wishes')
return id
