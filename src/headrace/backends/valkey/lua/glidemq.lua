-- The producer's side of glide-mq's wire protocol, for servers on which no Node process has loaded its own library.
-- Signatures, return values and keys are those of the protocol; arguments after the 17th are optional. Everything that
-- can refuse a job is checked before the first write.

local BAND = 4398046511104 -- 2^42: one priority of the `scheduled` set
local MAX_PRIORITY = 2048 -- 2048 * 2^42 is the last score that a double holds exactly
local MAX_TRIES = 1000
local EVENTS_CAP = 1000
local COST_TOO_HIGH = 'ERR:COST_EXCEEDS_CAPACITY'

local function call(...)
  return redis.call(...)
end

local function str(number)
  return string.format('%.0f', number)
end

local function prefix_of(key)
  local prefix = string.match(key or '', '^(.*):id$')
  if not prefix then error({ text = 'the key of the id counter must end in :id, not ' .. tostring(key) }, 0) end
  return prefix
end

local function announce(prefix, kind, id, ...)
  local cap = call('HGET', prefix .. ':meta', 'hrEvents') or EVENTS_CAP
  call('XADD', prefix .. ':events', 'MAXLEN', '~', cap, '*', 'event', kind, 'jobId', id, ...)
end

-- Brokers of Headrace that wait for jobs of the queue have noted in its meta until when.
local function wake(prefix)
  local parked = call('HGET', prefix .. ':meta', 'hrParked')
  if parked and tonumber(parked) > tonumber(call('TIME')[1]) * 1000 then
    call('PUBLISH', string.match(prefix, '^(.*):{') .. ':hr:wake', string.match(prefix, '{(.*)}$'))
  end
end

-- -- checks -------------------------------------------------------------------------------------------------------------

local function whole(text, what)
  local number = tonumber(text)
  if not number or number ~= number or math.abs(number) == math.huge then
    error({ text = what .. ' must be a number, not ' .. tostring(text) }, 0)
  end
  return number
end

local function check_priority(priority)
  if priority > MAX_PRIORITY then error({ text = 'priority must be at most ' .. MAX_PRIORITY }, 0) end
end

-- Characters and not bytes: those that do not continue another one in UTF-8.
local function length_of(text)
  local _, count = string.gsub(text, '[^\128-\191]', '')
  return count
end

local function check_custom_id(id)
  if length_of(id) > 256 or string.find(id, '[%c{}:]') then
    error({ text = 'a custom job id has at most 256 characters, no control characters and none of { } :' }, 0)
  end
end

local function cost_of(job)
  return job.cost > 0 and job.cost or 1000
end

local function is_too_costly(job)
  return job.group ~= '' and job.capacity > 0 and cost_of(job) > job.capacity
end

-- The arguments of addJob from `at` on, checked.
local function read_job(prefix, args, at)
  local function number(n, what)
    return whole(args[at + n] == '' and '0' or args[at + n], what)
  end
  local job = {
    prefix = prefix,
    name = args[at],
    data = args[at + 1],
    opts = args[at + 2],
    timestamp = whole(args[at + 3], 'timestamp'),
    delay = number(4, 'delay'),
    priority = number(5, 'priority'),
    parent_id = args[at + 6] or '',
    attempts = number(7, 'maxAttempts'),
    group = args[at + 8] or '',
    concurrency = number(9, 'groupConcurrency'),
    rate_max = number(10, 'groupRateMax'),
    rate_duration = number(11, 'groupRateDuration'),
    capacity = number(12, 'tbCapacity'),
    refill = number(13, 'tbRefillRate'),
    cost = number(14, 'jobCost'),
    ttl = number(15, 'ttl'),
    custom_id = args[at + 16] or '',
  }
  check_priority(job.priority)
  check_custom_id(job.custom_id)
  return job
end

-- -- ids ----------------------------------------------------------------------------------------------------------------

local function exists(prefix, id)
  return call('EXISTS', prefix .. ':job:' .. id) == 1
end

-- The id of a new job; nil when a custom one is taken, false when no automatic one is free.
local function draw_id(prefix, custom_id, taken)
  if custom_id ~= '' then
    if exists(prefix, custom_id) then return nil end
    local number = string.match(custom_id, '^%d+$') and tonumber(custom_id)
    if number and number < 2 ^ 53 and number > (tonumber(call('GET', prefix .. ':id')) or 0) then
      call('SET', prefix .. ':id', str(number))
    end
    return custom_id
  end
  for _ = 1, MAX_TRIES do
    local id = str(call('INCR', prefix .. ':id'))
    if not exists(prefix, id) and not (taken and taken[prefix .. ' ' .. id]) then return id end
  end
  return false
end

-- -- storing ------------------------------------------------------------------------------------------------------------

local function set_group(job)
  local key = job.prefix .. ':group:' .. job.group
  local set = { 'maxConcurrency', str(math.max(1, job.concurrency)) }
  local function put(...)
    for _, value in ipairs({ ... }) do set[#set + 1] = value end
  end
  if job.rate_max > 0 then
    put('rateMax', str(job.rate_max), 'rateDuration', str(job.rate_duration))
  else
    call('HDEL', key, 'rateMax', 'rateDuration')
  end
  if job.capacity > 0 then
    put('tbCapacity', str(job.capacity), 'tbRefillRate', str(job.refill))
    if call('HEXISTS', key, 'tbTokens') == 0 then
      put('tbTokens', str(job.capacity), 'tbLastRefill', str(job.timestamp), 'tbRefillRemainder', '0')
    end
  else
    call('HDEL', key, 'tbCapacity', 'tbRefillRate', 'tbTokens', 'tbLastRefill', 'tbRefillRemainder')
  end
  call('HSETNX', key, 'nextSeq', '1')
  call('HSET', key, unpack(set))
end

local function fields_of(job, id, state)
  local fields = { 'id', id, 'name', job.name, 'data', job.data, 'opts', job.opts, 'timestamp', str(job.timestamp) }
  local function put(name, value)
    fields[#fields + 1] = name
    fields[#fields + 1] = value
  end
  put('attemptsMade', '0')
  put('delay', str(job.delay))
  put('priority', str(job.priority))
  put('maxAttempts', str(job.attempts))
  put('state', state)
  if job.seq then
    put('groupKey', job.group)
    put('orderingSeq', str(job.seq))
  end
  if job.cost > 0 then put('cost', str(job.cost)) end
  if job.ttl > 0 then put('expireAt', str(job.timestamp + job.ttl)) end
  if job.parent_id ~= '' then put('parentId', job.parent_id) end
  if (job.parent_queue or '') ~= '' then put('parentQueue', job.parent_queue) end
  if (job.scheduler or '') ~= '' then put('schedulerName', job.scheduler) end
  if job.lifo then put('lifo', '1') end
  return fields
end

local function state_of(job)
  if job.delay > 0 then return 'delayed' end
  return job.priority > 0 and 'prioritized' or 'waiting'
end

-- Into the place that its state names; the entry id for jobs in the stream.
local function enqueue(job, id)
  local p = job.prefix
  if job.delay > 0 then
    call('ZADD', p .. ':scheduled', str(math.max(0, job.priority) * BAND + job.timestamp + job.delay), id)
  elseif job.priority > 0 then
    call('ZADD', p .. ':scheduled', str(job.priority * BAND), id)
  elseif job.lifo then
    call('RPUSH', p .. ':lifo', id)
  else
    return call('XADD', p .. ':stream', '*', 'jobId', id, 'name', job.name)
  end
end

local function store(job, id, state)
  if job.group ~= '' then
    job.seq = call('HINCRBY', job.prefix .. ':ordering', job.group, 1)
    set_group(job)
  end
  local fields = fields_of(job, id, state or state_of(job))
  if not state then
    local entry = enqueue(job, id)
    if entry then
      fields[#fields + 1] = 'entry'
      fields[#fields + 1] = entry
    end
  end
  call('HSET', job.prefix .. ':job:' .. id, unpack(fields))
  if not job.is_silent then announce(job.prefix, 'added', id, 'name', job.name) end
  if not state then wake(job.prefix) end
end

local function add(job, deps_key)
  if is_too_costly(job) then return COST_TOO_HIGH end
  local id = draw_id(job.prefix, job.custom_id)
  if id == nil then return 'duplicate' end
  if id == false then return 'ERR:ID_EXHAUSTED' end
  store(job, id)
  -- A child that does not know the queue of its parent could not tell it of its end.
  if deps_key and job.parent_id ~= '' and (job.parent_queue or '') ~= '' then call('SADD', deps_key, job.prefix .. ':' .. id) end
  return id
end

-- -- functions ----------------------------------------------------------------------------------------------------------

local function define(name, run, flags)
  redis.register_function({
    function_name = 'glidemq_' .. name,
    flags = flags,
    callback = function(keys, args)
      local done, result = pcall(run, keys, args)
      if done then return result end
      local text = type(result) == 'table' and (result.text or result.err) or tostring(result)
      return redis.error_reply('ERR glidemq_' .. name .. ': ' .. text)
    end,
  })
end

define('version', function() return VERSION end, { 'no-writes' })

define('addJob', function(keys, args)
  local job = read_job(prefix_of(keys[1]), args, 1)
  job.lifo, job.parent_queue, job.scheduler, job.is_silent = args[18] == '1', args[19], args[20], args[21] == '1'
  return add(job, keys[5])
end)

-- Entries whose job is gone are dropped a few at a time, so that the hash does not grow for ever.
local function tidy_dedup(key, prefix, now, keep)
  local some = call('HRANDFIELD', key, 2, 'WITHVALUES')
  for i = 1, #some, 2 do
    local id, at = string.match(some[i + 1], '^([^:]*):(%d+)')
    if id and now - tonumber(at) > math.max(keep, 86400000) and not exists(prefix, id) then call('HDEL', key, some[i]) end
  end
end

-- The job is taken away: its place in the order of its group is passed over or, if it was started before, its slot is free.
local function close_hole(prefix, old)
  local group, seq, slot = old[2], old[3], old[4]
  if not group or not seq then return end
  local key = prefix .. ':group:' .. group
  local known = call('HMGET', key, 'nextSeq', 'active')
  if tonumber(seq) >= (tonumber(known[1]) or 1) then
    call('HSET', key, 'skip:' .. seq, '1')
  elseif slot ~= '0' and (tonumber(known[2]) or 0) > 0 then
    call('HINCRBY', key, 'active', -1)
  end
  call('ZADD', prefix .. ':ratelimited', 'NX', 0, group) -- whoever promotes next lets those behind it go
end

-- Whether the job that the dedup id stands for keeps a new one out; a debounced one is taken away first.
local function is_held(prefix, mode, ttl, now, entry)
  local id, at = string.match(entry, '^([^:]*):(%d+)')
  if not id then return false end
  if mode == 'throttle' then return ttl > 0 and now - tonumber(at) < ttl end
  local old = call('HMGET', prefix .. ':job:' .. id, 'state', 'groupKey', 'orderingSeq', 'gslot')
  local state = old[1]
  if not state or state == 'completed' or state == 'failed' then return false end
  if mode == 'simple' then return true end
  if mode ~= 'debounce' then return false end
  if state ~= 'delayed' and state ~= 'prioritized' then return true end
  return false, id, old
end

define('dedup', function(keys, args)
  local prefix = prefix_of(keys[2])
  local dedup_id, ttl, mode = args[1], whole(args[2] == '' and '0' or args[2], 'ttlMs'), args[3]
  local job = read_job(prefix, args, 4)
  job.lifo, job.parent_queue, job.is_silent = args[21] == '1', args[22], args[23] == '1'
  local entry = call('HGET', keys[1], dedup_id)
  local held, old_id, old = false, nil, nil
  if entry then held, old_id, old = is_held(prefix, mode, ttl, job.timestamp, entry) end
  if held then return 'skipped' end
  if is_too_costly(job) then return COST_TOO_HIGH end
  if job.custom_id ~= '' and job.custom_id ~= old_id and exists(prefix, job.custom_id) then return 'duplicate' end
  if old_id then
    call('ZREM', prefix .. ':scheduled', old_id)
    close_hole(prefix, old)
    call('UNLINK', prefix .. ':job:' .. old_id)
    announce(prefix, 'removed', old_id)
  end
  local id = add(job, keys[6])
  if id ~= 'duplicate' and string.sub(id, 1, 4) ~= 'ERR:' then
    call('HSET', keys[1], dedup_id, id .. ':' .. str(job.timestamp))
    tidy_dedup(keys[1], prefix, job.timestamp, ttl)
  end
  return id
end)

-- -- flows --------------------------------------------------------------------------------------------------------------

-- Group, cost, ttl and lifo of flow jobs stand in their options.
local function with_opts(job)
  local done, opts = pcall(cjson.decode, job.opts)
  if not done or type(opts) ~= 'table' then opts = {} end
  local function number(value)
    return tonumber(value) or 0
  end
  local ordering = type(opts.ordering) == 'table' and opts.ordering or {}
  local rate = type(ordering.rateLimit) == 'table' and ordering.rateLimit or {}
  local bucket = type(ordering.tokenBucket) == 'table' and ordering.tokenBucket or {}
  job.group = type(ordering.key) == 'string' and ordering.key or ''
  job.concurrency = number(ordering.concurrency)
  job.rate_max, job.rate_duration = number(rate.max), number(rate.duration)
  job.capacity, job.refill = math.floor(number(bucket.capacity) * 1000), math.floor(number(bucket.refillRate) * 1000)
  job.cost, job.ttl, job.lifo = math.floor(number(opts.cost) * 1000), number(opts.ttl), opts.lifo == true
  return job
end

local function read_flow(keys, args)
  local parent = with_opts({
    prefix = prefix_of(keys[1]),
    name = args[1],
    data = args[2],
    opts = args[3],
    timestamp = whole(args[4], 'timestamp'),
    delay = whole(args[5], 'parentDelay'),
    priority = whole(args[6], 'parentPriority'),
    attempts = whole(args[7], 'parentMaxAttempts'),
    custom_id = args[9] or '',
    parent_id = '',
  })
  check_priority(parent.priority)
  check_custom_id(parent.custom_id)
  local children = {}
  for i = 1, whole(args[8], 'numChildren') do
    local base = 9 + (i - 1) * 9
    children[i] = with_opts({
      prefix = prefix_of(keys[4 + (i - 1) * 4 + 1]),
      name = args[base + 1],
      data = args[base + 2],
      opts = args[base + 3],
      timestamp = parent.timestamp,
      delay = whole(args[base + 4], 'childDelay'),
      priority = whole(args[base + 5], 'childPriority'),
      attempts = whole(args[base + 6], 'childMaxAttempts'),
      member_prefix = args[base + 7],
      parent_queue = args[base + 8],
      custom_id = args[base + 9] or '',
    })
    check_priority(children[i].priority)
    check_custom_id(children[i].custom_id)
  end
  local at, extras = 9 + #children * 9 + 1, {}
  for i = 1, whole(args[at] or '0', 'numExtraDeps') do extras[i] = args[at + i] end
  return parent, children, extras
end

-- A job elsewhere that the parent waits for too may have finished already.
local function is_finished(member)
  local prefix, id = string.match(member, '^(.*}):(.*)$')
  if not prefix then return false end
  local done, state = pcall(call, 'HGET', prefix .. ':job:' .. id, 'state')
  return done and state == 'completed'
end

local function draw_ids(jobs)
  local taken, ids = {}, {}
  for _, job in ipairs(jobs) do
    if job.custom_id ~= '' then
      local key = job.prefix .. ' ' .. job.custom_id
      if taken[key] or exists(job.prefix, job.custom_id) then return nil end
      taken[key] = true
    end
  end
  for i, job in ipairs(jobs) do
    local id = draw_id(job.prefix, job.custom_id, taken)
    if not id then return id end
    ids[i] = id
  end
  return ids
end

define('addFlow', function(keys, args)
  local parent, children, extras = read_flow(keys, args)
  local all = { parent, unpack(children) }
  for _, job in ipairs(all) do
    if is_too_costly(job) then return COST_TOO_HIGH end
  end
  local ids = draw_ids(all)
  if ids == nil then return '["duplicate"]' end
  if ids == false then return '["ERR:ID_EXHAUSTED"]' end
  local p, parent_id = parent.prefix, ids[1]
  local members, finished = {}, {}
  for i, child in ipairs(children) do members[i] = child.member_prefix .. ':' .. ids[i + 1] end
  for _, extra in ipairs(extras) do
    members[#members + 1] = extra
    if is_finished(extra) then finished[#finished + 1] = extra end
  end
  local is_ready = #members == #finished
  parent.is_silent = true -- it is told of after its children
  store(parent, parent_id, not is_ready and 'waiting-children' or nil)
  if not is_ready then call('SADD', p .. ':hr:blocked', parent_id) end
  if #members > 0 then call('SADD', p .. ':deps:' .. parent_id, unpack(members)) end
  for _, member in ipairs(finished) do
    call('HSET', p .. ':job:' .. parent_id, 'depdone:' .. member, '1')
    call('HINCRBY', p .. ':job:' .. parent_id, 'depsCompleted', 1)
  end
  for i, child in ipairs(children) do
    child.parent_id = parent_id
    store(child, ids[i + 1])
  end
  announce(p, 'added', parent_id, 'name', parent.name)
  return cjson.encode(ids)
end)

-- -- pausing ------------------------------------------------------------------------------------------------------------

local function set_paused(keys, value, kind)
  local prefix = string.match(keys[1] or '', '^(.*):meta$')
  if not prefix then error({ text = 'the first key must end in :meta, not ' .. tostring(keys[1]) }, 0) end
  call('HSET', keys[1], 'paused', value)
  announce(prefix, kind, '0')
  wake(prefix)
  return 1
end

define('pause', function(keys) return set_paused(keys, '1', 'paused') end)
define('resume', function(keys) return set_paused(keys, '0', 'resumed') end)
