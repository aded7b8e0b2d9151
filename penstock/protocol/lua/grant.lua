-- grant: groups beyond the gate, for a batch that cannot be filled from what the gate admits (leader).
-- KEYS: leader, subs, sub:NAME of the one that asks, delayed, counters, jobs:train, jobs:resume, jobs:suspect,
--       then sub:NAME of all that the gate counts together with it (itself, or its pool)
-- ARGV: prefix, epoch, token, groups, completed groups that they were computed from
-- Returns: groups granted now, 0 when none are granted (or the gate cannot be counted), -1: leadership lost
-- Atomic because it is granted only while the gate is closed, nothing is in flight and the ask is unfilled: repeating
-- it must not admit twice as much. The cut takes it back.
local leader_key, subs_key, sub_key, delayed_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local counters_key, train_key, resume_key, suspect_key = KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local first_member_key = 9
local prefix, epoch, token, groups, completed = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]

freeing(prefix)
if not leads(leader_key, epoch, token) then return -1 end
local s = numbers_of(sub_key, 'ask', 'cut')
if not s or s[1] <= s[2] then return 0 end
local flying = redis.call('ZCARD', delayed_key)
for _, key in ipairs({train_key, resume_key, suspect_key}) do flying = flying + redis.call('XLEN', key) end
if flying > 0 or (redis.call('HGET', counters_key, 'completed') or '0') ~= completed then return 0 end
local members = {}
for i = first_member_key, #KEYS do members[#members + 1] = KEYS[i] end
local admitted, gone = stock_of(prefix)
local free = places(subs_key, members, admitted, gone)
if not free or free > 0 then return 0 end
local owed = redis.call('HINCRBY', sub_key, 'owed', groups)
poke(prefix .. 'gate')
return owed
