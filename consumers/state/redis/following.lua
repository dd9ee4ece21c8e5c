-- The functions of the Redis store that keep the progress of requests that clients follow. They decide like
-- consumers/state/sqlite/following.py.
--
-- The submission of a request is the hash `followed`. Its entries (steps and events) are the stream `entries`, with the
-- ids `0-<number>`.

-- `...`: the names of the submission's other fields, each followed by its value.
function run.follow(keep_until, kind, body, hash, ...)
  local row = read(request)
  if row and not row.noted then return other_body(row, hash) and 'conflict' or 'known' end
  local before = row and row.deferred and redis.call('HGET', followed, 'hash')
  if before then return before == hash and 'known' or 'conflict' end
  write_new(row, 'noted', '1')
  -- The request may have ended before it was claimed. Readers have seen its end as entry `last + 1`: skip that number.
  local ended = tonumber(redis.call('HGET', followed, 'last'))
  local number = ended and ended + 2 or 1
  redis.call('DEL', followed, entries)
  redis.call('HSET', followed, 'last', number, 'events', 0, 'bytes', #body, 'hash', hash, ...)
  redis.call('XADD', entries, '0-' .. number, kind, body)
  for i = 1, 3 do redis.call('PEXPIRE', KEYS[i], keep_until - now) end
  return 'new'
end

function run.unfollow()
  local row = read(request)
  if row and row.deferred then redis.call('DEL', request, followed, entries) end
end

function run.submission()
  return redis.call('HMGET', followed, 'hash', 'lane', 'submitted', 'due', 'deadline')
end

-- After the three arguments, there are for each request: the token of its claim, the number of its new entries, the
-- names and values of its submission's five fields (10 arguments), and each entry's kind and body.
function run.append(keep_ms, events_at_most, bytes_at_most)
  local function append(key, followed, entries, at)
    local row = read(key)
    if not row or row.ended or row.token ~= tonumber(ARGV[at]) then return 'fenced' end
    local first, last = at + 12, at + 10 + 2 * ARGV[at + 1]
    local starts, has_events, kept = 0, false, {}
    for i = first, last, 2 do
      if ARGV[i] == 'restart' then starts = i end
    end
    local held = redis.call('HMGET', followed, 'last', 'events', 'bytes')
    local number, events, bytes = tonumber(held[1]) or 0, tonumber(held[2]) or 0, tonumber(held[3]) or 0
    if starts > 0 then events, bytes = 0, 0 end
    for i = first, last, 2 do
      local is_event = ARGV[i] == 'event'
      if not is_event or i >= starts then
        kept[#kept + 1] = i
        bytes = bytes + #ARGV[i + 1]
        has_events = has_events or is_event
        if is_event then events = events + 1 end
      end
    end
    if has_events and (events > tonumber(events_at_most) or bytes > tonumber(bytes_at_most)) then return 'full' end
    if not held[1] then redis.call('HSET', followed, unpack(ARGV, at + 2, at + 11)) end
    if starts > 0 then forget_events(entries) end  -- another call has begun: those of the call before are not needed
    for _, i in ipairs(kept) do
      number = number + 1
      redis.call('XADD', entries, '0-' .. number, ARGV[i], ARGV[i + 1])
    end
    redis.call('HSET', followed, 'last', number, 'events', events, 'bytes', bytes)
    redis.call('PEXPIRE', followed, keep_ms)
    redis.call('PEXPIRE', entries, keep_ms)
    return ''
  end
  local at, results = 4, {}
  for i = 1, #KEYS, 3 do
    results[#results + 1] = append(KEYS[i], KEYS[i + 1], KEYS[i + 2], at)
    at = at + 12 + 2 * ARGV[at + 1]
  end
  return results
end

-- After `most` and `left` there is one more argument for each request: the number of the last entry that was read.
function run.look(most, left)
  local news = {}
  left = tonumber(left)
  for i = 1, #KEYS, 3 do
    local after = tonumber(ARGV[2 + (i + 2) / 3])
    local status = redis.call('HMGET', KEYS[i], 'token', 'status', 'cancelling')
    local last = tonumber(redis.call('HGET', KEYS[i + 1], 'last')) or 0
    local ended = (status[2] or '') ~= '' and status[3] ~= '1'
    if last > after or ended or not status[1] then
      local found = {}
      if last > after and left > 0 then
        found = redis.call('XRANGE', KEYS[i + 2], '0-' .. (after + 1), '+', 'COUNT', math.min(most, left))
        left = left - #found
      end
      news[#news + 1] = {(i - 1) / 3, last, ended and 1 or 0, status[1] and 1 or 0, found}
    end
  end
  return news
end
