-- lost: the payload of a sample that was cut is gone (trainer that looked for it).
-- KEYS: counters
-- ARGV: prefix, then per sample: job, k
-- Returns: samples that nobody had reported before
-- Atomic because every rank and every delivery may find it, and it counts once.
freeing(ARGV[1])
local new = 0
for i = 2, #ARGV, 2 do new = new + lose(ARGV[1], ARGV[i], ARGV[i + 1]) end
return new
