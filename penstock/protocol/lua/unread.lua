-- unread: prefixes that cannot be continued are dropped; their samples start over (worker).
-- KEYS: group:JOB
-- ARGV: prefix, job, token, then k of each
-- Returns: 1, or 0 when the lease is lost
-- Atomic because a prefix and its tokens in the ledger change together, and because a worker that lost its lease must
-- not drop its successor's (I3).
local group_key = KEYS[1]
local prefix, job, token = ARGV[1], ARGV[2], ARGV[3]
local first_sample = 4

freeing(prefix)
local g = redis.call('HMGET', group_key, 'st', 'tok', 'ln')
if g[1] ~= 'leased' or g[2] ~= token then return 0 end
for i = first_sample, #ARGV do
  local name = 't:' .. ARGV[i]
  redis.call('DEL', prefix .. 'partial:' .. job .. '/' .. ARGV[i])
  book(prefix, g[3], 'unreadable_prefix', numbers_in(redis.call('HGET', group_key, name))[1])
  redis.call('HDEL', group_key, name)
end
return 1
