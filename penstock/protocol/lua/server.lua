-- server: a payload server becomes known, or changes its state (operator; any part, for those of its configuration).
-- KEYS: servers
-- ARGV: prefix, name, record, only when nothing is known of it (0|1), random word that is the directory's
--       revision from now on
-- Returns: 1, or 0 when it was known and nothing was changed
-- Atomic because workers look at the revision alone.
local servers_key = KEYS[1]
local prefix, name, record, only_new, revision = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]

freeing(prefix)
local known = redis.call('HEXISTS', servers_key, 's:' .. name) == 1
if known and only_new == '1' then return 0 end
redis.call('HSET', servers_key, 's:' .. name, record, 'rev', revision)
return 1
