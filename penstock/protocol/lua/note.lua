-- note: write a small record of a present or waiting process, for views ('' deletes it).
-- KEYS: hash of such records
-- ARGV: prefix, field, record
-- Returns: 1
-- A script so that it is allowed when Redis is full, which is when waits have to be reported.
local records_key = KEYS[1]
local prefix, name, record = ARGV[1], ARGV[2], ARGV[3]

freeing(prefix)
if record == '' then redis.call('HDEL', records_key, name) else redis.call('HSET', records_key, name, record) end
return 1
