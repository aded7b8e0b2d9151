-- conclude: the batch that a subscription asks for will not be cut, since the data has ended (leader).
-- KEYS: leader, source, sub:NAME, delayed, counters, then jobs:LANE of every lane whose jobs it may still use
-- ARGV: prefix, epoch, token, number of the batch, position at which the data ends, completed groups when it was seen
-- Returns: 1 concluded, 0: something has changed meanwhile, -1: leadership lost
-- Atomic because it is true only while everything is admitted and nothing is queued, running or to be retried; no
-- batch is cut after it until the trainer joins or rewinds anew, so that all ranks see the same end.
local leader_key, source_key, sub_key, delayed_key, counters_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local first_lane_key = 6
local prefix, epoch, token = ARGV[1], ARGV[2], ARGV[3]
local n, end_position, completed = tonumber(ARGV[4]), ARGV[5], ARGV[6]

freeing(prefix)
if not leads(leader_key, epoch, token) then return -1 end
local source = redis.call('HMGET', source_key, 'train', 'end')
if source[2] ~= end_position or tonumber(source[1] or 0) < tonumber(end_position) then return 0 end
local s = redis.call('HMGET', sub_key, 'ask', 'cut')
if tonumber(s[2] or 0) ~= n - 1 or tonumber(s[1] or 0) < n then return 0 end
local flying = redis.call('ZCARD', delayed_key)
for i = first_lane_key, #KEYS do flying = flying + redis.call('XLEN', KEYS[i]) end
if flying > 0 or (redis.call('HGET', counters_key, 'completed') or '0') ~= completed then return 0 end
redis.call('HSET', sub_key, 'ended', n)
return 1
