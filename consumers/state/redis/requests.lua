-- The functions of the Redis store that read and swap requests. What is decided is in consumers/state/decisions.py. A
-- request has three Redis keys. That for its claim and result is a hash, whose fields are like the columns of the table
-- `request` in sqlite/file.py; an empty field means NULL. The submission of a followed request, and how far its progress
-- has come, is the hash `followed`. Its entries are the stream `entries`, with the ids `0-<number>`.
local FIELDS = {
  'token', 'hash', 'mark', 'lease', 'claimed', 'attempts', 'noted', 'cancelling', 'nonce', 'deaths', 'due',
  'status', 'code', 'headers', 'ended', 'group', 'line',
}
local LINE = #FIELDS
local NEW = {'body', ''}
for _, name in ipairs(FIELDS) do
  NEW[#NEW + 1], NEW[#NEW + 2] = name, ''
end
local function keep_group(group, groups, group_id, keep_ms)
  redis.call('PEXPIREAT', group, keep_ms)
  redis.call('ZADD', groups, keep_ms, group_id)
  redis.call('PEXPIREAT', groups, redis.call('ZRANGE', groups, -1, -1, 'WITHSCORES')[2])
end
local ENDED = {'succeeded', 'errored', 'canceled', 'expired'}
-- Counts in its group that a request is another kind now: that before (nothing: it is a new member) and after, when it
-- has ended, until when it is kept, and what else `Counted` has; the head of a new group; the request's and the group's
-- id, the keys of the group, its members, the tenant's groups, the groups that have ended and all groups, its place among
-- these, and how many groups a tenant may have.
local function count(change)
  local parts = {}
  for part in (change .. '\0'):gmatch('(%Z*)%z') do parts[#parts + 1] = part end
  local was, kind, ended, keep_ms, saved_usd, size, key, webhook, head = unpack(parts, 1, 9)
  local id, group_id, group, members, groups, all_ended, all, place, most = unpack(parts, 10)
  if redis.call('EXISTS', group) == 0 then
    if was ~= '' or redis.call('ZCOUNT', groups, '(' .. now, '+inf') >= tonumber(most) then return end
    redis.call('HSET', group, 'head', head)
    redis.call('ZADD', all, cjson.decode(head).created_ms, place)
    keep_group(group, groups, group_id, keep_ms)
  end
  if was == '' then redis.call('RPUSH', members, id) else redis.call('HINCRBY', group, was, -1) end
  redis.call('HINCRBY', group, kind, 1)
  if tonumber(ended) > tonumber(redis.call('HGET', group, 'ended') or 0) then redis.call('HSET', group, 'ended', ended) end
  if tonumber(size) > tonumber(redis.call('HGET', group, 'size') or 0) then redis.call('HSET', group, 'size', size) end
  if tonumber(saved_usd) > 0 then redis.call('HINCRBYFLOAT', group, 'saved_usd', saved_usd) end
  if key ~= '' then redis.call('HSETNX', group, 'key', key) end
  if webhook ~= '' then redis.call('HSETNX', group, 'webhook', webhook) end
  if kind ~= 'processing' then
    local found, ended_count = redis.call('HMGET', group, 'processing', 'size', 'told', unpack(ENDED)), 0
    for i = 4, 3 + #ENDED do ended_count = ended_count + (found[i] or 0) end
    -- no other one: of those that never end there may be many, among which one that has would wait for its turn
    if tonumber(found[1] or 0) == 0 and not found[3] and found[2] and tonumber(found[2]) <= ended_count then
      redis.call('SADD', all_ended, group)
    end
  end
  local left_ms = tonumber(keep_ms) - now
  if left_ms > redis.call('PTTL', group) then keep_group(group, groups, group_id, keep_ms) end
  if left_ms > redis.call('PTTL', members) then redis.call('PEXPIREAT', members, keep_ms) end
end
-- The list is a sorted set of lines (`_line` in store.py), by when the store heard of the requests first. A second one
-- has those alone that are not completed, which are few: most questions are about them.
local COMPLETED = '\ts=completed\t'
local function list(listed, was, line)
  if was ~= '' then
    redis.call('ZREM', listed, was)
    redis.call('ZREM', listed .. ':uncompleted', was)
  end
  if line ~= '' then
    redis.call('ZADD', listed, line:match('^%d+'), line)
    if not line:find(COMPLETED, 1, true) then redis.call('ZADD', listed .. ':uncompleted', line:match('^%d+'), line) end
  end
end
local PROGRESS = {'hash', 'last', 'events', 'bytes'}
local function read(request, followed)
  local values = redis.call('HMGET', request, unpack(FIELDS))
  if not values[1] then return {} end
  for _, value in ipairs(redis.call('HMGET', followed, unpack(PROGRESS))) do values[#values + 1] = value end
  for i = 1, #FIELDS + #PROGRESS do values[i] = values[i] or '' end
  return values
end
local function add_entries(followed, entries, forget, first, from, count)
  if forget == 'all' then
    redis.call('DEL', entries)
  elseif forget ~= '' then
    for _, entry in ipairs(redis.call('XRANGE', entries, '-', '+')) do
      if entry[2][1] == forget then redis.call('XDEL', entries, entry[1]) end
    end
  end
  for i = 0, count - 1 do
    redis.call('XADD', entries, '0-' .. (first + i), ARGV[from + 2 * i], ARGV[from + 2 * i + 1])
  end
end

-- Swaps requests that are as the caller expects them. `at`: when it decided, by the clock of Redis. `listed`: the key of
-- the list. Returns the time, and for each request 1, or what it is if it is another, or if the decision is older than
-- `stale_ms`. The arguments for each request, after these four: what is expected (the values that `read` returns, joined
-- by zero bytes; nothing: no request), until when it is kept (0: it is removed; nothing: as before), the numbers of
-- arguments for its hash, its progress and its entries, which entries to remove, the number of the first one, what to
-- count in its group (nothing: nothing), and these arguments. Those for its hash begin with its line if that changes.
function run.swap(at, stale_ms, with_body, listed)
  local next, results = 5, {now}
  for k = 1, #KEYS, 3 do
    local request, followed, entries = KEYS[k], KEYS[k + 1], KEYS[k + 2]
    local expected, keep_ms, fields, progress, added, forget, first, counted = unpack(ARGV, next, next + 7)
    local from = next + 8
    fields, progress, added = tonumber(fields), tonumber(progress), tonumber(added)
    next = from + fields + progress + added
    local found, result = read(request, followed), 1
    if table.concat(found, '\0') ~= expected or math.abs(now - at) > tonumber(stale_ms) then
      result = found
      if #found > 0 then
        found[#found + 1] = redis.call('PTTL', request)
        found[#found + 1] = with_body == '1' and found[12] ~= '' and redis.call('HGET', request, 'body') or ''
      end
    elseif keep_ms == '0' then
      redis.call('DEL', request, followed, entries)
      list(listed, found[LINE] or '', '')
    else
      if #found == 0 and fields > 0 then redis.call('HSET', request, unpack(NEW)) end
      if fields > 0 then redis.call('HSET', request, unpack(ARGV, from, from + fields - 1)) end
      if fields > 0 and ARGV[from] == 'line' then list(listed, found[LINE] or '', ARGV[from + 1]) end
      if progress > 0 then
        if forget == 'all' then redis.call('DEL', followed) end
        redis.call('HSET', followed, unpack(ARGV, from + fields, from + fields + progress - 1))
        add_entries(followed, entries, forget, first, from + fields + progress, added / 2)
      end
      for i = k, k + 2 do
        if keep_ms ~= '' then redis.call('PEXPIREAT', KEYS[i], keep_ms) end
      end
      if counted ~= '' then count(counted) end
    end
    results[#results + 1] = result
  end
  return results
end

-- Counts an unseen cancellation of a tenant. Returns the oldest that are beyond the limit.
function run.count_unseen(id, keep_ms, most, at_once)
  local unseen = KEYS[1]
  redis.call('ZREMRANGEBYSCORE', unseen, '-inf', now)
  redis.call('ZADD', unseen, keep_ms, id)
  redis.call('PEXPIREAT', unseen, redis.call('ZRANGE', unseen, -1, -1, 'WITHSCORES')[2])
  local surplus = math.min(redis.call('ZCARD', unseen) - most, at_once)
  local found = {}
  for i = 1, surplus do found[i] = redis.call('ZPOPMIN', unseen)[1] end
  return found
end

function run.endings()
  local found = {}
  for i, key in ipairs(KEYS) do
    local row = redis.call('HMGET', key, 'status', 'code', 'ended', 'cancelling', 'lease')
    local held = (tonumber(row[5]) or 0) > now and 1 or 0
    found[i] = row[1] and {row[1], row[2], row[3], redis.call('HSTRLEN', key, 'body'), row[4], held}
  end
  return found
end

function run.submission()
  return redis.call('HMGET', KEYS[2], 'hash', 'lane', 'submitted', 'due', 'deadline')
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

-- Looks at the next `count` lines of the list, the newest first, from those of the time `at` on, of which `passed` were
-- looked at before. What follows `most` are the filters: of each, how many texts there are, and the texts, one of which
-- a line must contain. Returns whether these were the last lines, the place that was reached, and the lines that fit.
function run.listed(at, passed, since, count, most)
  passed, count, most = tonumber(passed), tonumber(count), tonumber(most)
  local lines = redis.call('ZREVRANGEBYSCORE', KEYS[1], at, since, 'LIMIT', passed, count)
  local found, reached = {}, #lines
  for i, line in ipairs(lines) do
    local next, fits = 6, true
    while fits and next <= #ARGV do
      local last = next + ARGV[next]
      fits = false
      for n = next + 1, last do
        if line:find(ARGV[n], 1, true) then fits = true break end
      end
      next = last + 1
    end
    if fits then
      found[#found + 1] = line
      if #found == most then reached = i break end
    end
  end
  if reached == #lines and #lines < count then return {1, 0, 0, found} end
  local ms, ties = lines[reached]:match('^%d+'), 1
  while reached > ties and lines[reached - ties]:match('^%d+') == ms do ties = ties + 1 end
  if ms == at then ties = ties + passed end
  return {0, tonumber(ms), ties, found}
end

-- Removes lines of requests that have expired, of `count` ones from a place on (0 to 1, of all).
function run.tidy(begin, count, place)
  local first = math.floor(place * redis.call('ZCARD', KEYS[1]))
  local removed = 0
  for _, line in ipairs(redis.call('ZRANGE', KEYS[1], first, first + count - 1)) do
    local tenant, id = line:match('^%d+\tt=([^\t]*)\ti=([^\t]*)\t')
    if redis.call('EXISTS', begin .. tenant .. ':' .. id) == 0 then
      removed = removed + redis.call('ZREM', KEYS[1], line)
      redis.call('ZREM', KEYS[1] .. ':uncompleted', line)
    end
  end
  return removed
end
