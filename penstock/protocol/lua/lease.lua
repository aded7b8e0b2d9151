-- lease: queued -> leased (worker). Never blocks; sleep on the list `wake` instead.
-- KEYS: inflight, paused, then jobs:LANE in the order of search
-- ARGV: prefix, worker, token base, most jobs, engine version, suspects allowed (0|1), highest version at admission
--       that the engine may start, then the lanes' names in the order of KEYS
-- Returns: list of {lane, job, token, nb, body, attempts, crashes, {k committed}, 1: only the group's reward is
-- missing}
-- Atomic because a job must not be leased to two workers, nor start on weights older than `nb` (T12),
-- except those of a version that was set aside, within the bound. Of the jobs that may be started those of the
-- oldest version come first, then the oldest, whatever precedes them in the lane.
local inflight_key, paused_key = KEYS[1], KEYS[2]
local first_lane_key = 3
local prefix, worker, base, most = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local version, suspects, highest = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local first_lane = 8

local leased, now = {}, now_ms()

-- Lease the first job in order; false when no more of this lane may be started.
local function lease_one(key, lane)
  local line = line_key_of(prefix, lane)
  local place = redis.call('ZRANGEBYSCORE', line, '-inf', highest, 'LIMIT', 0, 1)[1]
  if not place then return false end
  redis.call('ZREM', line, place)
  local eid = entry_of(place)
  local entry = redis.call('XRANGE', key, eid, eid)[1]
  if not entry then return true end
  local job = field(entry[2], 'id')
  local gkey = group_key_of(prefix, job)
  local g = redis.call('HMGET', gkey, 'st', 'eid', 'v0', 'c', 'pf', 'nb', 'att', 'cr', 'ln', 'n', 'tr', 'rw', 'w')
  if g[1] ~= 'queued' or g[2] ~= eid then
    redis.call('XDEL', key, eid)
    return true
  end
  -- pending from now on, wherever in the stream it is: its idle time tells when the lease runs out
  redis.call('XCLAIM', key, GROUP, worker, 0, eid, 'FORCE', 'JUSTID')
  local token = base .. '.' .. #leased
  local v0 = version
  if g[3] and (tonumber(g[4] or 0) > 0 or g[5]) then v0 = math.min(v0, tonumber(g[3])) end
  redis.call('HSET', gkey, 'st', 'leased', 'tok', token, 'own', worker, 'v0', v0,
    'tr', with_try(g[11], lane, worker, now))
  redis.call('HSETNX', gkey, 't0', now)
  if g[9] == 'train' then redis.call('ZADD', inflight_key, v0, job) end
  local committed = {}
  if tonumber(g[4] or 0) > 0 then
    for k = 0, tonumber(g[13] or g[10]) - 1 do
      if redis.call('HEXISTS', gkey, 's:' .. k) == 1 then committed[#committed + 1] = k end
    end
  end
  local rewards = g[12] == '1' and g[4] == g[10] and 1 or 0
  leased[#leased + 1] = {
    lane, job, token, g[6], field(entry[2], 'body'), g[7] or '0', g[8] or '0', committed, rewards,
  }
  return true
end

for i = 0, #KEYS - first_lane_key do
  local key, lane = KEYS[first_lane_key + i], ARGV[first_lane + i]
  require_lane(prefix, lane)
  local open = redis.call('SISMEMBER', paused_key, lane) == 0
  while open and #leased < most do
    local limited = lane == 'suspect'
    if limited and suspects <= 0 then break end
    local before = #leased
    if not lease_one(key, lane) then break end
    if limited then suspects = suspects - (#leased - before) end
  end
end
return leased
