-- Counts a request of a caller (an API key), and takes a slot for each generation of the request.
-- If this would exceed one of the caller's limits, does neither.
-- KEYS: the caller's token bucket for requests (the time when it will be full again, ms), the
--   caller's slots (set of slot names, sorted by the end of each slot's lease)
-- ARGV: requests_per_minute (0 = no limit), depth of the bucket in minutes (0 = the request was
--   counted before), concurrency (0 = no limit),
--   lease_ms, then the slots. Slots that are taken already stay taken.
-- Returns {'taken', 0}, or {'rate', ms until the next request is allowed}, or {'slots', 0}.
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + time[2] / 1000
local rate, depth, concurrency = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])

if concurrency > 0 then
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', string.format('%.0f', now_ms))
  local num_new = 0
  for i = 5, #ARGV do
    if not redis.call('ZSCORE', KEYS[2], ARGV[i]) then num_new = num_new + 1 end
  end
  if num_new > 0 and redis.call('ZCARD', KEYS[2]) + num_new > concurrency then
    return {'slots', 0}
  end
end

if rate > 0 and depth > 0 then
  local full_at = math.max(tonumber(redis.call('GET', KEYS[1]) or 0) or 0, now_ms) + 60000 / rate
  local over_ms = full_at - now_ms - 60000 * depth
  -- Times are stored in thousandths of a millisecond. The tolerance covers their rounding.
  if over_ms > 0.5 then return {'rate', math.ceil(over_ms)} end
  redis.call('SET', KEYS[1], string.format('%.3f', full_at), 'PX',
    string.format('%.0f', math.ceil(full_at - now_ms) + 1))
end

if concurrency > 0 then
  local until_ms = string.format('%.0f', now_ms + ARGV[4])
  for i = 5, #ARGV do redis.call('ZADD', KEYS[2], until_ms, ARGV[i]) end
  redis.call('PEXPIRE', KEYS[2], ARGV[4])
end
return {'taken', 0}
