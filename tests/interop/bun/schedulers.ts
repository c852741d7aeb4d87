/** Job schedulers: intervals and cron patterns, their listing, change, limit and removal. */
import { addNamed, check, eventually, finish, handWorker, holds, never, openQueue, openWorker, queueName, same, take } from './check';

await check('an interval produces job after job', async () => {
  const name = queueName('every');
  const queue = openQueue(name);
  const seen: [string, unknown, number | undefined][] = [];
  openWorker(name, async (job) => void seen.push([job.name, job.data, job.opts.attempts]));
  const before = Date.now();
  const info = await queue.upsertJobScheduler(`${name}-s`, { every: 200 }, { name: 'tick', data: { n: 1 }, opts: { attempts: 9 } });
  same([info!.id, info!.name, info!.every], [`${name}-s`, 'tick', 200], 'scheduler');
  holds(info!.next >= before + 100 && info!.next <= Date.now() + 300, `next run: ${info!.next - before} ms from now`);
  await eventually(() => seen.length >= 3, 'three runs');
  same(seen[0], ['tick', { n: 1 }, 9], 'job');
  same(await queue.removeJobScheduler(`${name}-s`), true, 'removed');
});

await check('immediately runs at once, then by interval', async () => {
  const name = queueName('now');
  const queue = openQueue(name);
  const start = Date.now();
  await queue.upsertJobScheduler(`${name}-s`, { every: 60_000, immediately: true }, { name: 'first' });
  const worker = handWorker(name);
  let job: { name: string } | undefined;
  await eventually(async () => (job = await worker.getNextJob()), 'first run', 5_000);
  same(job!.name, 'first', 'name');
  holds(Date.now() - start < 4_000, 'it did not wait for the interval');
  await eventually(async () => (await queue.getJobScheduler(`${name}-s`))!.next > start + 50_000, 'next run is an interval away');
  await queue.removeJobScheduler(`${name}-s`);
});

await check('a cron pattern has its next run at a full minute', async () => {
  const name = queueName('pattern');
  const queue = openQueue(name);
  const info = await queue.upsertJobScheduler(`${name}-s`, { pattern: '*/5 * * * *' }, { name: 'five' });
  same([info!.pattern, info!.next % 300_000], ['*/5 * * * *', 0], 'pattern and next');
  holds(info!.next > Date.now() && info!.next <= Date.now() + 300_000, 'within five minutes');
  await queue.removeJobScheduler(`${name}-s`);
});

await check('a cron pattern counts in its time zone', async () => {
  const name = queueName('zone');
  const queue = openQueue(name);
  const info = await queue.upsertJobScheduler(`${name}-s`, { pattern: '30 9 * * *', timezone: 'Asia/Kolkata' });
  const next = new Date(info!.next);
  same([next.getUTCHours(), next.getUTCMinutes()], [4, 0], 'half past nine in Kolkata is four o\'clock UTC');
  await queue.removeJobScheduler(`${name}-s`);
});

await check('a pattern with seconds runs each time', async () => {
  const name = queueName('seconds');
  const queue = openQueue(name);
  let runs = 0;
  openWorker(name, async () => void runs++);
  await queue.upsertJobScheduler(`${name}-s`, { pattern: '* * * * * *' }, { name: 'second' });
  await eventually(() => runs >= 3, 'three runs of a schedule of one second', 6_000);
  await queue.removeJobScheduler(`${name}-s`);
});

await check('schedulers of a queue are listed, counted and read one by one', async () => {
  const name = queueName('list');
  const queue = openQueue(name);
  const other = openQueue(queueName('other'));
  await queue.upsertJobScheduler(`${name}-a`, { every: 60_000, limit: 5 }, { name: 'a' });
  await queue.upsertJobScheduler(`${name}-b`, { pattern: '0 0 * * *' }, { name: 'b' });
  await other.upsertJobScheduler(`${name}-c`, { every: 60_000 });
  const listed = await queue.getJobSchedulers(0, -1, true);
  same(listed.map((entry) => [entry.id, entry.name, entry.every, entry.pattern, entry.limit]).sort(), [
    [`${name}-a`, 'a', 60_000, undefined, 5],
    [`${name}-b`, 'b', undefined, '0 0 * * *', undefined],
  ], 'list');
  same(await queue.getJobSchedulersCount(), 2, 'count');
  same((await queue.getJobScheduler(`${name}-a`))!.every, 60_000, 'one');
  same(await queue.getJobScheduler(`${name}-c`), null, 'one of another queue');
  for (const key of ['a', 'b']) same(await queue.removeJobScheduler(`${name}-${key}`), true, 'remove');
  same(await queue.removeJobScheduler(`${name}-a`), false, 'remove again');
  await other.removeJobScheduler(`${name}-c`);
  same(await queue.getJobSchedulersCount(), 0, 'count at the end');
});

await check('upsert changes a scheduler instead of adding one', async () => {
  const name = queueName('upsert');
  const queue = openQueue(name);
  await queue.upsertJobScheduler(`${name}-s`, { every: 60_000 }, { name: 'old' });
  await queue.upsertJobScheduler(`${name}-s`, { every: 90_000 }, { name: 'new' });
  const [entry, ...rest] = await queue.getJobSchedulers();
  same([entry!.every, entry!.name, rest.length], [90_000, 'new', 0], 'scheduler');
  await queue.removeJobScheduler(`${name}-s`);
});

await check('a limit ends the scheduler', async () => {
  const name = queueName('limit');
  const queue = openQueue(name);
  let runs = 0;
  openWorker(name, async () => void runs++);
  await queue.upsertJobScheduler(`${name}-s`, { every: 100, limit: 2 });
  await eventually(async () => (await queue.getJobScheduler(`${name}-s`)) === null, 'scheduler is gone');
  await eventually(() => runs === 2, 'two runs');
  await never(() => runs > 2, 'a third run', 300);
});

await check('a run is not queued while the previous one waits, unless overlap is allowed', async () => {
  const name = queueName('overlap');
  const [guarded, free] = [openQueue(name), openQueue(`${name}-free`)];
  await guarded.upsertJobScheduler(`${name}-g`, { every: 80 });
  await free.upsertJobScheduler(`${name}-f`, { every: 80, preventOverlap: false });
  await eventually(async () => (await free.getWaitingCount()) >= 4, 'four runs pile up where overlap is allowed');
  same(await guarded.getWaitingCount(), 1, 'one waits where it is not');
  await guarded.removeJobScheduler(`${name}-g`);
  await free.removeJobScheduler(`${name}-f`);
});

await check('skipIfNoWorker skips runs until a worker is there', async () => {
  const name = queueName('lonely');
  const queue = openQueue(name);
  await queue.upsertJobScheduler(`${name}-s`, { every: 80, skipIfNoWorker: true });
  await never(async () => (await queue.getWaitingCount()) > 0, 'a run without a worker', 400);
  let runs = 0;
  openWorker(name, async () => void runs++);
  await eventually(() => runs > 0, 'a run with a worker');
  await queue.removeJobScheduler(`${name}-s`);
});

await check('a wrong pattern is refused and stores nothing', async () => {
  const name = queueName('wrong');
  const queue = openQueue(name);
  same(await queue.upsertJobScheduler(`${name}-s`, { pattern: 'every tuesday' }), null, 'pattern');
  same(await queue.upsertJobScheduler(`${name}-s`, {}), null, 'neither pattern nor interval');
  same(await queue.getJobSchedulersCount(), 0, 'count');
});

await check('priority and deduplication of the template reach the jobs', async () => {
  const name = queueName('template');
  const queue = openQueue(name);
  await addNamed(queue, ['plain']);
  await queue.upsertJobScheduler(`${name}-s`, { every: 60_000, immediately: true }, {
    name: 'urgent', opts: { priority: 20, deduplication: { id: `${name}-key` } },
  });
  await eventually(async () => (await queue.getPrioritizedCount()) === 1, 'the scheduled job waits');
  const job = await take(handWorker(name));
  same([job.name, job.priority, job.uniqueKey], ['urgent', 20, `${name}-key`], 'job');
  await queue.removeJobScheduler(`${name}-s`);
});

finish();
