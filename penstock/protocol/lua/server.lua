-- server: add a payload server, or change its state (operator; any process, for those of its configuration).
-- KEYS: servers
-- ARGV: prefix, name, record, only if it is not known (0|1), random word that becomes the directory's
--       revision
-- Returns: 1, or 0 when it was known and nothing was changed
-- Atomic because workers compare only the revision.
local servers_key = KEYS[1]
local prefix, name, record, only_new, revision = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]

freeing(prefix)
local known = redis.call('HEXISTS', servers_key, 's:' .. name) == 1
if known and only_new == '1' then return 0 end
redis.call('HSET', servers_key, 's:' .. name, record, 'rev', revision)
return 1
