-- ended: how jobs came to their end, by what of the user's code judged them (worker; statistics, nothing moves).
-- KEYS: ends
-- ARGV: prefix, jobs that are remembered of each, then per kind: its name, a digit for each job (1: it died of user
--       code, 2: it was refused), the last words of the last of these ('': there was none)
-- Returns: number of kinds
-- Atomic because workers append to one line of digits.
freeing(ARGV[1])
for i = 3, #ARGV, 3 do
  local kind = ARGV[i]
  local digits = (redis.call('HGET', KEYS[1], 'd:' .. kind) or '') .. ARGV[i + 1]
  redis.call('HSET', KEYS[1], 'd:' .. kind, string.sub(digits, -tonumber(ARGV[2])))
  if ARGV[i + 2] ~= '' then redis.call('HSET', KEYS[1], 'w:' .. kind, ARGV[i + 2]) end
end
return (#ARGV - 2) / 3
