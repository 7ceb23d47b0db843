-- This file begins the scripts that change or load sessions. The keys of a session are session,
-- tokens, logprobs.
--
-- The hash has the byte ranges of the session in the two strings: tokens_start .. tokens_end and
-- logprobs_start .. logprobs_end (offsets; the end is excluded). A script first writes bytes after
-- the ends, where no reader looks. Then one HSET changes the hash, and commits the bytes with all
-- other fields. So if Redis aborts a script at any call (memory full, disk full, too few replicas,
-- rights withdrawn), readers see all of its changes or none. Times to live are set last. The next
-- write corrects a missing or short time to live.

-- Returns the part of a byte range that lies in the string. A damaged string may be shorter than
-- the hash says.
local function extent(key, start, stop)
  local size = redis.call('STRLEN', key)
  stop = math.min(tonumber(stop), size)
  return math.min(tonumber(start), stop), stop
end

-- Writes bytes at an offset within the string or at its end. A new string gets a time to live.
local function put(key, at, bytes, ttl_ms)
  if at == 0 then
    redis.call('SET', key, bytes, 'PX', ttl_ms)
  else
    redis.call('SETRANGE', key, at, bytes)
  end
end

-- Lets the rest of the script write although the server's memory is full. Redis refuses commands
-- that take memory only in a script that has not written yet, and it never refuses PEXPIRE.
local function write_when_full(key)
  local ttl_ms = redis.call('PTTL', key)
  if ttl_ms > 0 then redis.call('PEXPIRE', key, ttl_ms) end
end

-- Ensures that the session lives for at least ttl_ms. If its time to live is shorter, sets it to a
-- sixtieth more than ttl_ms, so that the next appends need not set it again.
local function prolong(keys, ttl_ms)
  if redis.call('PTTL', keys[1]) < tonumber(ttl_ms) then
    local longer_ms = string.format('%.0f', ttl_ms * 61 / 60)
    for _, key in ipairs(keys) do redis.call('PEXPIRE', key, longer_ms) end
  end
end

-- Returns {fields and values, {first byte, end} of the tokens, {first byte, end} of the
-- log-probabilities}. The caller reads the bytes with read_part.lua.
local function read()
  local ends = redis.call('HMGET', KEYS[1], 'tokens_start', 'tokens_end', 'logprobs_start',
    'logprobs_end')
  local found = {redis.call('HGETALL', KEYS[1])}
  for i = 2, 3 do found[i] = {extent(KEYS[i], ends[2 * i - 3], ends[2 * i - 2])} end
  return found
end
