-- commit: written -> committed, and leased -> ready with the last k (worker). Several samples of one job at once.
-- KEYS: group:JOB, meta:JOB, ready, inflight, samples
-- ARGV: prefix, job, token, then per sample: k, oldest version (-1: none), metadata record
-- Returns: {'ok' | 'ready' | 'lost', new commits, already committed by this token, committed by another lease}
-- Atomic because a sample must be committed at most once, whoever tries, however late (I2), and only by the
-- holder of the lease (I3). Saying it twice with the same token changes nothing.
-- Samples are looked up and written together: a call of Redis from a script costs as much as the work it does here.
local prefix, job, token = ARGV[1], ARGV[2], ARGV[3]
local places = {}
for i = 4, #ARGV, 3 do places[#places + 1] = 's:' .. ARGV[i] end
local before = redis.call('HMGET', KEYS[1], unpack(places))
local g = redis.call('HMGET', KEYS[1], 'st', 'tok', 'n', 'o', 'ln', 'nb', 'cl', 'eid')
local new, again, taken = 0, 0, 0
if g[1] ~= 'leased' or g[2] ~= token then
  for _, held in ipairs(before) do
    if held == token then again = again + 1 end
  end
  if again == #places then return {g[1] == 'ready' and 'ready' or 'ok', 0, again, 0} end
  count(prefix, 'refused')
  return {'lost', 0, again, 0}
end
local oldest = tonumber(g[4] or -1)
local seen, fields, records, partials = {}, {}, {}, {}
for i, held in ipairs(before) do
  local at = 3 * i + 1
  if held == token or seen[places[i]] then
    again = again + 1
  elseif held then
    taken = taken + 1
  else
    seen[places[i]] = true
    fields[#fields + 1] = places[i]
    fields[#fields + 1] = token
    records[#records + 1] = ARGV[at + 2]
    partials[#partials + 1] = prefix .. 'partial:' .. job .. '/' .. ARGV[at]
    local o = tonumber(ARGV[at + 1])
    if o >= 0 and (oldest < 0 or o < oldest) then oldest = o end
    new = new + 1
  end
end
if new > 0 then
  redis.call('HSET', KEYS[1], 'o', oldest, unpack(fields))
  redis.call('APPEND', KEYS[2], table.concat(records))
  redis.call('DEL', unpack(partials))
  count(prefix, 'committed', new)
end
if taken > 0 then count(prefix, 'refused', taken) end
local committed = redis.call('HINCRBY', KEYS[1], 'c', new)
if committed < tonumber(g[3]) then return {'ok', new, again, taken} end
redis.call('HSET', KEYS[1], 'st', 'ready')
redis.call('HDEL', KEYS[1], 'tok', 'own', 'pf')
redis.call('XACK', lane_key(prefix, g[7]), GROUP, g[8])
redis.call('XDEL', lane_key(prefix, g[7]), g[8])
redis.call('ZREM', KEYS[4], job)
redis.call('ZADD', KEYS[3], count(prefix, 'completed'), job)
leave_cohort(prefix, job, g[5], g[6])
event(prefix, 'completed', job, g[5])
return {'ready', new, again, taken}
