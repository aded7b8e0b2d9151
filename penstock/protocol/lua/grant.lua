-- grant: groups owed to a batch that cannot be filled from what the gate admits (leader).
-- KEYS: leader, subs, sub:NAME of the one that asks, delayed, counters, jobs:LANE of every train job's lanes (3),
--       then sub:NAME of all that the gate counts together with it (itself, or its pool)
-- ARGV: prefix, epoch, token, groups, completed groups that they were reckoned by
-- Returns: groups owed now, 0 when none are granted, -1: leadership lost
-- Atomic because it is granted only while the gate is closed, nothing is in flight and the ask is unfilled: said
-- twice, it must not let in twice as much. The cut takes it back.
local prefix = ARGV[1]
freeing(prefix)
if not leads(KEYS[1], ARGV[2], ARGV[3]) then return -1 end
local s = redis.call('HMGET', KEYS[3], 'ask', 'cut')
if tonumber(s[1] or 0) <= tonumber(s[2] or 0) then return 0 end
local flying = redis.call('ZCARD', KEYS[4])
for i = 6, 8 do flying = flying + redis.call('XLEN', KEYS[i]) end
if flying > 0 or (redis.call('HGET', KEYS[5], 'completed') or '0') ~= ARGV[5] then return 0 end
local members = {}
for i = 9, #KEYS do members[#members + 1] = KEYS[i] end
local admitted, gone = stock_of(prefix)
if (places(KEYS[2], members, admitted, gone)) > 0 then return 0 end
local owed = redis.call('HINCRBY', KEYS[3], 'owed', ARGV[4])
poke(prefix .. 'gate')
return owed
