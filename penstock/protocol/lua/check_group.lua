-- check_group: does a group's state agree with the container it should be in (audit)?
-- KEYS: group:JOB, meta:JOB, ready, delayed, dead, inflight, retiring
-- ARGV: prefix, job
-- Returns: '' when it agrees or is gone; else what is wrong
-- Atomic because jobs move during an audit.
local group_key, meta_key, ready_key, delayed_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local dead_key, inflight_key, retiring_key = KEYS[5], KEYS[6], KEYS[7]
local prefix, job = ARGV[1], ARGV[2]

local g = redis.call('HMGET', group_key, 'st', 'cl', 'eid', 'c', 'n', 'tok', 'ln', 'co', 'nb', 'rw')
local st = g[1]
if not st then return '' end
local function entry(key)
  local found = redis.call('XRANGE', key, g[3], g[3])
  return #found == 1 and field(found[1][2], 'id') == job
end
if (st == 'queued' or st == 'leased') then
  if not entry(lane_key_of(prefix, g[2])) then return st .. ' but not in lane ' .. g[2] end
  local pending = #redis.call('XPENDING', lane_key_of(prefix, g[2]), GROUP, g[3], g[3], 1)
  local needs = redis.call('ZSCORE', line_key_of(prefix, g[2]), place_of(g[3]))
  if (needs ~= false) ~= (st == 'queued') then return st .. ', and in the line of lane ' .. g[2] .. ' or not' end
  if needs and tonumber(needs) ~= tonumber(g[9]) then return 'queued in the line of another version' end
  if st == 'queued' and pending == 1 then return 'queued but delivered' end
  if st == 'leased' and pending == 0 then return 'leased but not delivered' end
  if st == 'leased' and not g[6] then return 'leased without a token' end
end
local function disagrees(is_in, state) return is_in ~= (st == state) and st .. ', and in ' .. state .. ' or not' end
local unrecorded = redis.call('ZSCORE', prefix .. 'unrecorded', job) ~= false
local wrong = disagrees(redis.call('ZSCORE', ready_key, job) ~= false, 'ready')
  or disagrees(redis.call('ZSCORE', delayed_key, job) ~= false, 'delayed')
  or disagrees(redis.call('SISMEMBER', retiring_key, job) == 1 or unrecorded, 'retiring')
  or unrecorded and redis.call('SISMEMBER', retiring_key, job) == 1 and 'recorded, and unrecorded too'
if wrong then return wrong end
local live = st == 'queued' or st == 'leased' or st == 'delayed'
if (redis.call('ZSCORE', prefix .. 'unfinished:' .. g[7], job) ~= false) ~= (live and g[8] ~= false) then
  return st .. ', and in unfinished or not'
end
local running = redis.call('ZSCORE', inflight_key, job)
if running and not live then return st .. ' but in flight' end
if st == 'leased' and g[7] == 'train' and not running then return 'leased but not in flight' end
if st == 'dead' and not entry(dead_key) then return 'dead but without a dead letter' end
if st == 'ready' and g[4] ~= g[5] then return 'ready with ' .. g[4] .. ' of ' .. g[5] .. ' samples' end
if st == 'ready' and g[10] == '1' then return 'ready, and its reward is to come' end
if live and g[4] == g[5] and g[10] ~= '1' then return st .. ' with all its samples, and no reward to come' end
local commits = 0
for _, name in ipairs(redis.call('HKEYS', group_key)) do
  if string.sub(name, 1, 2) == 's:' then commits = commits + 1 end
end
if tonumber(g[4]) ~= commits then return g[4] .. ' commits counted, ' .. commits .. ' found' end
if commits > 0 and redis.call('EXISTS', meta_key) == 0 then return 'committed samples without metadata' end
return ''
