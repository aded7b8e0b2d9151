-- ended: record how jobs ended, per reward or environment of the user (worker; statistics, nothing moves).
-- KEYS: ends
-- ARGV: prefix, jobs that are remembered of each, then per kind: its name, a digit for each job (1: the user's
--       code failed, 2: it was refused), the last error ('': none)
-- Returns: number of kinds
-- Atomic because workers append to one line of digits.
local ends_key = KEYS[1]
local prefix, window = ARGV[1], tonumber(ARGV[2])
local first_kind = 3

freeing(prefix)
for i = first_kind, #ARGV, 3 do
  local kind, new, words = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local digits = (redis.call('HGET', ends_key, 'd:' .. kind) or '') .. new
  redis.call('HSET', ends_key, 'd:' .. kind, string.sub(digits, -window))
  if words ~= '' then redis.call('HSET', ends_key, 'w:' .. kind, words) end
end
return (#ARGV - first_kind + 1) / 3
