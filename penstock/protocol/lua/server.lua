-- server: a payload server becomes known, or changes its state (operator; any part, for those of its configuration).
-- KEYS: servers
-- ARGV: prefix, name, record, only when nothing is known of it (0|1)
-- Returns: revision of the directory, or 0 when it was known and nothing was changed
-- Atomic because workers look at the revision alone.
freeing(ARGV[1])
local known = redis.call('HEXISTS', KEYS[1], 's:' .. ARGV[2]) == 1
if known and ARGV[4] == '1' then return 0 end
redis.call('HSET', KEYS[1], 's:' .. ARGV[2], ARGV[3])
return redis.call('HINCRBY', KEYS[1], 'rev', 1)
