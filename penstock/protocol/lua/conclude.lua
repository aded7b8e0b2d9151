-- conclude: the batch that a subscription asks for never comes, since the data has ended (leader).
-- KEYS: leader, source, sub:NAME, delayed, counters, then jobs:LANE of every lane whose jobs it may still be given
-- ARGV: prefix, epoch, token, number of the batch, position at which the data ends, completed groups when it was seen
-- Returns: 1 concluded, 0: something moved meanwhile, -1: leadership lost
-- Atomic because it is true only while everything is admitted and nothing is queued, running or to be tried again; no
-- batch is cut after it until the trainer joins or rewinds anew, so that all ranks see the same end.
freeing(ARGV[1])
if not leads(KEYS[1], ARGV[2], ARGV[3]) then return -1 end
local source = redis.call('HMGET', KEYS[2], 'train', 'end')
if source[2] ~= ARGV[5] or tonumber(source[1] or 0) < tonumber(ARGV[5]) then return 0 end
local s = redis.call('HMGET', KEYS[3], 'ask', 'cut')
local n = tonumber(ARGV[4])
if tonumber(s[2] or 0) ~= n - 1 or tonumber(s[1] or 0) < n then return 0 end
local flying = redis.call('ZCARD', KEYS[4])
for i = 6, #KEYS do flying = flying + redis.call('XLEN', KEYS[i]) end
if flying > 0 or (redis.call('HGET', KEYS[5], 'completed') or '0') ~= ARGV[6] then return 0 end
redis.call('HSET', KEYS[3], 'ended', n)
return 1
