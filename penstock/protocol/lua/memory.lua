-- memory: say which memory the engines of a model are to do without (trainer or operator).
-- KEYS: memory:MODEL
-- ARGV: prefix, record of the wish
-- Returns: id of the entry
-- Atomic because the newest entry is the whole truth: who reads it needs no other.
freeing(ARGV[1])
local id = redis.call('XADD', KEYS[1], 'MAXLEN', '~', 16, '*', 'w', ARGV[2])
count(ARGV[1], 'memory_wishes')
return id
