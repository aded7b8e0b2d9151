-- note: a small record of who is there or waits, shown to people ('' takes it away).
-- KEYS: hash of such records
-- ARGV: prefix, field, record
-- Returns: 1
-- One script so that it is allowed when Redis is full, which is when waits have to be told.
local records_key = KEYS[1]
local prefix, name, record = ARGV[1], ARGV[2], ARGV[3]

freeing(prefix)
if record == '' then redis.call('HDEL', records_key, name) else redis.call('HSET', records_key, name, record) end
return 1
