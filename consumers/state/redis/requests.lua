-- The local functions that the functions below share, which read and write a request. A request has three
-- Redis keys: for its claim and result, for its submission, and for its entries. The key for its claim and result is a
-- hash, whose fields are like the columns of the table `request` in sqlite/file.py; an empty field means NULL.
local request, followed, entries = KEYS[1], KEYS[2], KEYS[3]
local FIELDS = {
  'hash', 'mark', 'token', 'nonce', 'deaths', 'lease', 'claimed', 'attempts', 'noted', 'cancelling', 'due',
  'status', 'code', 'ended',
}
local function read(key)
  local values, row = redis.call('HMGET', key, unpack(FIELDS)), {}
  if not values[3] then return nil end
  for i, name in ipairs(FIELDS) do row[name] = values[i] or '' end
  row.token, row.lease, row.deaths = tonumber(row.token), tonumber(row.lease), tonumber(row.deaths) or 0
  row.cancelling = row.cancelling == '1'
  row.noted = row.noted == '1'
  row.ended_ms, row.ended = row.ended, row.status ~= '' and not row.cancelling
  row.deferred = row.noted and row.status == ''
  return row
end
local function next_token(row) return row and row.token + 1 or now end
-- Writes a request as if it were new. `...`: the fields with other values than those given here, each followed by its
-- value.
local function write_new(row, ...)
  redis.call('HSET', request, 'hash', '', 'mark', '', 'token', next_token(row), 'nonce', '', 'deaths', 0,
    'lease', 0, 'claimed', 0, 'attempts', 0, 'noted', '', 'cancelling', '', 'due', '',
    'status', '', 'code', '', 'headers', '', 'ended', '', 'body', '', ...)
end
local function ending()
  return redis.call('HMGET', request, 'status', 'code', 'headers', 'ended', 'body', 'mark')
end
local function end_as_cancelled(kept_ms, ...)
  redis.call('HSET', request, 'lease', 0, 'cancelling', '', ...)
  redis.call('PEXPIRE', request, math.max(redis.call('PTTL', request), tonumber(kept_ms)))
end
local function forget_events(key)
  for _, entry in ipairs(redis.call('XRANGE', key, '-', '+')) do
    if entry[2][1] == 'event' then redis.call('XDEL', key, entry[1]) end
  end
end
local function runs_again(row, dead_at)
  return row.ended and row.status == 'error' and dead_at ~= '' and dead_at == row.ended_ms
end
local function other_body(row, hash) return row.hash ~= '' and row.hash ~= hash end
local function is_held(row, mark, redelivered, nonce)
  local is_own = row.mark == mark and row.nonce:sub(1, 1):lower() == nonce:sub(1, 1)
  return row.lease > now and not (redelivered == '1' and is_own)
end
local function ending_for(row, mark)
  local found = ending()
  if row.mark == '' then redis.call('HSET', request, 'mark', mark) end
  return found
end
local function restart_entries(keep_ms)
  local last = tonumber(redis.call('HGET', followed, 'last'))
  if not last then return end
  -- clients that follow the request have seen its end as entry `last + 1`, so that number is left out
  redis.call('XADD', entries, '0-' .. (last + 2), 'restart', '{}')
  redis.call('HSET', followed, 'last', last + 2, 'events', 0, 'bytes', 0)
  forget_events(entries)
  redis.call('PEXPIRE', followed, keep_ms)
  redis.call('PEXPIRE', entries, keep_ms)
end

-- The functions of the Redis store that claim, complete and cancel requests. Each decides like the method of the same
-- name in consumers/state/sqlite/tables.py, which is easier to read.
function run.claim(lease_ms, keep_ms, cancelled_ms, hash, mark, redelivered, dead_at, nonce, keep_until)
  local row, attempts, deaths = read(request), 0, 0
  if row and not row.noted and not runs_again(row, dead_at) then
    if other_body(row, hash) then return {'conflict'} end
    if row.ended then
      return {'ended', (row.mark == '' or row.mark == mark) and 1 or 0, ending_for(row, mark)}
    end
    if nonce ~= '' and row.nonce == nonce then
      if row.lease == 0 then return {'running', now - tonumber(row.claimed)} end
      return {'granted', row.token, row.deaths, redis.call('EXISTS', followed)}
    end
    if is_held(row, mark, redelivered, nonce) then return {'running', now - tonumber(row.claimed)} end
    if row.cancelling then
      end_as_cancelled(cancelled_ms)
      return {'ended', 1, ending()}
    end
    attempts, deaths = row.attempts, row.deaths + (row.lease > 0 and not row.nonce:find('^%u') and 1 or 0)
  end
  -- of a request that has not ended, the field `headers` says where its pipeline stands
  local step = row and row.status == '' and redis.call('HGET', request, 'headers') or ''
  write_new(row, 'hash', hash, 'mark', mark, 'nonce', nonce, 'deaths', deaths, 'lease', now + lease_ms,
    'claimed', now, 'attempts', attempts, 'headers', step)
  redis.call('PEXPIRE', request, math.max(keep_ms + lease_ms, keep_until - now))
  if row and row.ended then restart_entries(keep_ms) end
  return {'granted', next_token(row), deaths, row and redis.call('EXISTS', followed) or 0}
end

-- After `lease_ms` and `keep_ms`, the arguments are for each claim its token, and the number of its pipeline's key, 0
-- without one. The keys of pipelines follow those of the claims.
function run.renew(lease_ms, keep_ms)
  local stops = {}
  for i = 1, (#ARGV - 2) / 2 do
    local key, token, owner = KEYS[i], tonumber(ARGV[2 * i + 1]), tonumber(ARGV[2 * i + 2])
    local row = read(key)
    stops[i] = owner > 0 and (redis.call('HGET', KEYS[owner], 'status') or '') ~= '' and 'cancelled' or ''
    if row and row.token ~= token then
      stops[i] = 'fenced'
    elseif row then
      if row.cancelling or (row.ended and row.code == 'cancelled') then stops[i] = 'cancelled' end
      if not row.ended and row.lease > 0 then
        redis.call('HSET', key, 'lease', now + lease_ms)
        redis.call('PEXPIRE', key, math.max(keep_ms + lease_ms, redis.call('PTTL', key)))
      end
    end
  end
  return stops
end

function run.shelter(token)
  local row = read(request)
  if row and row.token == tonumber(token) and row.lease > 0 and not row.ended then
    redis.call('HSET', request, 'nonce', '')
  end
end

function run.note_waiting(token, is_waiting)
  local row = read(request)
  if row and row.token == tonumber(token) and row.lease > 0 and not row.ended then
    local kind = row.nonce:sub(1, 1)
    kind = is_waiting == '1' and kind:upper() or kind:lower()
    redis.call('HSET', request, 'nonce', kind .. row.nonce:sub(2))
  end
end

function run.release(keep_ms, cancelled_ms, token, attempts, due, is_survived, step)
  local row = read(request)
  if not row or row.ended then return end
  if row.token ~= tonumber(token) then
    redis.call('HSET', request, 'deaths', math.max(0, row.deaths - 1))
  elseif row.cancelling then
    end_as_cancelled(cancelled_ms)
  else
    local deaths = is_survived == '1' and 0 or row.deaths
    redis.call('HSET', request, 'lease', 0, 'attempts', attempts, 'due', due, 'deaths', deaths,
      'headers', step)
    redis.call('PEXPIRE', request, math.max(tonumber(keep_ms), redis.call('PTTL', request)))
  end
end

-- `...`, here and in the functions below: the names of the completion's fields, each followed by its value.
function run.complete(keep_ms, token, hash, mark, redelivered, dead_at, nonce, keep_until, ...)
  local row = read(request)
  token = tonumber(token)
  if row and row.token == token then
    if row.ended then return {'held', ending()} end
    redis.call('HSET', request, 'lease', 0, 'cancelling', '', ...)
  else
    if row and not row.noted and not (not token and runs_again(row, dead_at)) then
      if other_body(row, hash) then return {token and 'fenced' or 'given'} end
      if row.ended then return {'held', ending_for(row, mark)} end
      if token or is_held(row, mark, redelivered, nonce) then return {'fenced'} end
    end
    write_new(row, 'hash', hash, 'mark', mark, 'nonce', nonce, 'claimed', now, ...)
    if row and row.ended then restart_entries(keep_ms) end
  end
  redis.call('PEXPIRE', request, math.max(tonumber(keep_ms), keep_until - now))
  return {'given'}
end

function run.defer(due, keep_until)
  local row = read(request)
  if row and not row.noted then return row.ended and 0 or 1 end
  write_new(row, 'noted', '1', 'due', due)
  redis.call('PEXPIRE', request, keep_until - now)
  return 1
end

function run.note(keep_ms, keep_until, ...)
  local row = read(request)
  if row and (not row.noted or (row.deferred and row.due ~= '')) then return end
  write_new(row, 'noted', '1', ...)
  redis.call('PEXPIRE', request, math.max(tonumber(keep_ms), keep_until - now))
end

function run.cancel(cancelled_ms, keep_ms, id, prefix, at_most, ...)
  local row, unseen = read(request), KEYS[4]
  if row and row.deferred then  -- kept like a result, and as long as its message waits in the broker
    write_new(row, 'due', row.due)
    end_as_cancelled(keep_ms, ...)
    if row.due ~= '' then return 'recorded' end
  elseif not row or row.noted then
    write_new(row)
    end_as_cancelled(cancelled_ms, ...)
  elseif row.ended then
    return 'ended'
  elseif row.lease > now then
    if not row.cancelling then redis.call('HSET', request, 'cancelling', '1', ...) end
    return 'told'
  else
    end_as_cancelled(cancelled_ms, ...)
    return 'recorded'
  end
  local ends = now + redis.call('PTTL', request)
  redis.call('ZREMRANGEBYSCORE', unseen, '-inf', now)
  redis.call('ZADD', unseen, ends, id)
  redis.call('PEXPIREAT', unseen, redis.call('ZRANGE', unseen, -1, -1, 'WITHSCORES')[2])
  local came_to = 'unseen'
  for _ = 1, 10 do
    if redis.call('ZCARD', unseen) <= tonumber(at_most) then break end
    local oldest = prefix .. redis.call('ZPOPMIN', unseen)[1]
    local old = read(oldest)
    if old and old.ended and old.code == 'cancelled' and old.hash == '' then redis.call('DEL', oldest) end
    came_to = 'displaced'
  end
  return row and row.deferred and 'recorded' or came_to
end

function run.find()
  local row = read(request)
  if not row then return nil end
  if row.ended then return {'ended', row.attempts, ending()} end
  local step = row.status == '' and redis.call('HGET', request, 'headers') or ''
  if row.lease > now then return {'running', row.attempts, '', step} end
  return {'waiting', row.attempts, row.due, step}
end

function run.endings()
  local found = {}
  for i, key in ipairs(KEYS) do
    local row = redis.call('HMGET', key, 'status', 'code', 'ended', 'cancelling')
    found[i] = row[1] and {row[1], row[2], row[3], redis.call('HSTRLEN', key, 'body'), row[4]}
  end
  return found
end

-- The functions that keep the progress of requests that clients follow. They decide like
-- consumers/state/sqlite/tables.py.
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
    if not row or row.ended or row.token ~= tonumber(ARGV[at]) or row.lease == 0 then return 'fenced' end
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
