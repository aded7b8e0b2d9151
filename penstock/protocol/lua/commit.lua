-- commit: written -> committed, and leased -> ready with the last k (worker). Several samples of one job at once.
-- If a group reward is still to come, the last k leaves the job leased, and the verb `reward` completes it.
-- KEYS: group:JOB, meta:JOB
-- ARGV: prefix, job, token, a group reward is still to come (0|1), then per sample: k, oldest version (-1: none),
-- metadata
--       record, report of tokens (`LIVE,BEHIND_STOP,REWOUND,LOST_TURN,UNHEARD`)
-- Returns: {'ok' | 'ready' | 'reward' (all are committed, the group's reward is still to come) | 'lost',
--           new commits, already committed by this token, committed by another lease}
-- Atomic because a sample must be committed at most once, however late and however often (I2), and only by the
-- holder of the lease (I3). Repeating it with the same token changes nothing.
-- Samples are read and written together: a Redis call from a script costs as much as the work it does here.
local group_key, meta_key = KEYS[1], KEYS[2]
local prefix, job, token, with_reward = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local first_sample = 5

local slots, words = {}, {}
for i = first_sample, #ARGV, 4 do
  slots[#slots + 1] = 's:' .. ARGV[i]
  words[#words + 1] = 't:' .. ARGV[i]
end
local before = redis.call('HMGET', group_key, unpack(slots))
local g = redis.call('HMGET', group_key, 'st', 'tok', 'n', 'o', 'ln', 'nb', 'cl', 'eid', 'tk', 'told', 'rw')
local new, again, taken = 0, 0, 0
if g[1] ~= 'leased' or g[2] ~= token then
  for _, held in ipairs(before) do
    if held == token then again = again + 1 end
  end
  if again == #slots then return {g[1] == 'ready' and 'ready' or 'ok', 0, again, 0} end
  count(prefix, 'refused')
  return {'lost', 0, again, 0}
end
require_lane(prefix, g[7])
local oldest = tonumber(g[4] or -1)
local seen, fields, records, partials, drawn, heard = {}, {}, {}, {}, {g[9] or nil}, 0
local told = g[10] and redis.call('HMGET', group_key, unpack(words)) or {}
for i, held in ipairs(before) do
  local at = first_sample + 4 * (i - 1)
  local k, o, record, word = ARGV[at], tonumber(ARGV[at + 1]), ARGV[at + 2], ARGV[at + 3]
  if held == token or seen[slots[i]] then
    again = again + 1
  elseif held then
    taken = taken + 1
  else
    seen[slots[i]] = true
    fields[#fields + 1] = slots[i]
    fields[#fields + 1] = token
    records[#records + 1] = record
    partials[#partials + 1] = prefix .. 'partial:' .. job .. '/' .. k
    local more, now = hear(prefix, g[5], told[i], word)
    heard = heard + more
    if now[1] > 0 then drawn[#drawn + 1] = k .. ':' .. now[1] end
    if o >= 0 and (oldest < 0 or o < oldest) then oldest = o end
    new = new + 1
  end
end
if new > 0 then
  redis.call('HSET', group_key, 'o', oldest, 'tk', table.concat(drawn, ','), unpack(fields))
  if g[10] then redis.call('HDEL', group_key, unpack(words)) end
  if with_reward == '1' then redis.call('HSET', group_key, 'rw', 1) end
  book(prefix, g[5], 'heard', heard)
  redis.call('APPEND', meta_key, table.concat(records))
  redis.call('DEL', unpack(partials))
  count(prefix, 'committed', new)
end
if taken > 0 then count(prefix, 'refused', taken) end
local committed = redis.call('HINCRBY', group_key, 'c', new)
if committed < tonumber(g[3]) then return {'ok', new, again, taken} end
if with_reward == '1' or g[11] then return {'reward', new, again, taken} end
complete(prefix, job, g[7], g[8])
return {'ready', new, again, taken}
