/** QueueEvents: which events of a queue reach a subscriber, how often and with what. */
import { UnrecoverableError } from 'bunqueue/client';
import {
  addNamed, check, closing, eventually, finish, handWorker, holds, never, openEvents, openQueue, openWorker, queueName,
  same, take,
} from './check';
import type { QueueEvents } from 'bunqueue/client';

const NAMES = [
  'waiting', 'active', 'progress', 'completed', 'failed', 'retried', 'paused', 'resumed', 'removed', 'delayed',
  'duplicated', 'drained', 'stalled', 'waiting-children',
] as const;
type Seen = { name: string; payload: Record<string, any> };

function record(events: QueueEvents): Seen[] {
  const seen: Seen[] = [];
  for (const name of NAMES) {
    (events as any).on(name, (payload: Record<string, any>) => seen.push({ name, payload }));
  }
  return seen;
}

function counts(seen: Seen[]): Record<string, number> {
  const result: Record<string, number> = {};
  for (const { name } of seen) result[name] = (result[name] ?? 0) + 1;
  return result;
}

await check('a mixed run produces exactly the expected counts', async () => {
  const name = queueName('mixed');
  const queue = openQueue(name);
  const seen = record(await openEvents(name));
  await queue.pauseAsync();
  await addNamed(queue, ['a', 'b', 'c']);
  await queue.add('flaky', {}, { attempts: 2, backoff: 20 });
  await queue.add('doomed', {}, { attempts: 5 });
  await queue.resumeAsync();
  let flakyRuns = 0;
  openWorker(name, async (job) => {
    await job.updateProgress(10);
    if (job.name === 'doomed') throw new UnrecoverableError('no');
    if (job.name === 'flaky' && ++flakyRuns === 1) throw new Error('once');
    return job.name;
  });
  const expected = {
    paused: 1, waiting: 5, resumed: 1, active: 6, progress: 6, completed: 4, failed: 2, retried: 1,
  };
  await eventually(() => counts(seen)['completed'] === 4 && counts(seen)['failed'] === 2, 'the run is over');
  await eventually(() => Bun.deepEquals(counts(seen), expected), `${JSON.stringify(expected)} but ${JSON.stringify(counts(seen))}`, 1_000);
});

await check('events of one job come in the order of its life', async () => {
  const name = queueName('order');
  const queue = openQueue(name);
  const seen = record(await openEvents(name));
  openWorker(name, async (job) => {
    await job.updateProgress(50);
    return { done: true };
  });
  const { id } = await queue.add('one', {});
  await eventually(() => seen.length === 4, 'four events');
  same(seen.map((event) => event.name), ['waiting', 'active', 'progress', 'completed'], 'names');
  holds(seen.every((event) => event.payload['jobId'] === id), 'each names the job');
  same(seen[2]!.payload['data'], 50, 'progress value');
  same(seen[3]!.payload['returnvalue'], { done: true }, 'returnvalue');
});

await check('failed tells the reason, retried what went before', async () => {
  const name = queueName('failed');
  const queue = openQueue(name);
  const seen = record(await openEvents(name));
  const worker = handWorker(name);
  const { id } = await queue.add('x', { key: 'value' }, { attempts: 2, backoff: 0 });
  const held = await take(worker);
  await queue.moveJobToFailed(id, new Error('broke'), held.token);
  await eventually(() => counts(seen)['retried'] === 1, 'retried');
  const failed = seen.find((event) => event.name === 'failed')!.payload;
  same([failed['jobId'], failed['failedReason'], failed['data']], [id, 'broke', { key: 'value' }], 'failed');
  same(seen.find((event) => event.name === 'retried')!.payload, { jobId: id, prev: 'failed' }, 'retried');
});

await check('removed, delayed, duplicated and drained are announced', async () => {
  const name = queueName('control');
  const queue = openQueue(name);
  const seen = record(await openEvents(name));
  const removed = await queue.add('gone', {});
  await removed.remove();
  const owner = await queue.add('owner', {}, { deduplication: { id: 'key' } });
  await queue.add('again', {}, { deduplication: { id: 'key' } });
  const held = await take(handWorker(name));
  await queue.moveJobToDelayed(owner.id, Date.now() + 5_000, held.token);
  await queue.add('left', {});
  await queue.drainAsync();
  const payload = (event: string) => seen.filter(({ name }) => name === event).map((entry) => entry.payload);
  await eventually(() => payload('delayed').length === 1, 'delayed');
  same(payload('removed'), [{ jobId: removed.id, prev: 'waiting' }], 'removed');
  same(payload('duplicated'), [{ jobId: owner.id }], 'duplicated');
  same(payload('delayed')[0]!['jobId'], owner.id, 'delayed job');
  holds(payload('delayed')[0]!['delay'] > 4_000, `delay: ${payload('delayed')[0]!['delay']}`);
  await eventually(() => payload('drained').length === 1, 'one drained event', 2_000);
});

await check('a subscriber hears its own queue only and nothing after close', async () => {
  const [name, other] = [queueName('mine'), queueName('theirs')];
  const queue = openQueue(name);
  const events = await openEvents(name);
  const seen = record(events);
  await openQueue(other).add('not-mine', {});
  const { id } = await queue.add('mine', {});
  await eventually(() => seen.length > 0, 'own event');
  same(seen.map((event) => event.payload['jobId']), [id], 'events');
  events.close();
  await queue.add('late', {});
  await never(() => seen.length > 1, 'an event after close', 150);
});

await check('two subscribers of a queue both hear everything', async () => {
  const name = queueName('both');
  const queue = openQueue(name);
  const [left, right] = [record(await openEvents(name)), record(await openEvents(name))];
  const added = await addNamed(queue, Array.from({ length: 100 }, (_, index) => `e${index}`));
  await eventually(() => left.length === 100 && right.length === 100, 'a hundred each');
  same(left.map((event) => event.payload['jobId']), added, 'in the order of the adds');
});

await check('trimEvents answers with a number', async () => {
  const queue = openQueue(queueName('trim'));
  await addNamed(queue, ['a', 'b', 'c']);
  const removed = await queue.trimEvents(0);
  holds(Number.isInteger(removed) && removed >= 0, `removed: ${removed}`);
});

await check('a worker is told when one of its jobs stalls', async () => {
  const name = queueName('stalled');
  const queue = openQueue(name);
  await queue.setStallConfigAsync({ stallInterval: 300, gracePeriod: 0, maxStalls: 5 });
  const stalled: string[] = [];
  const worker = openWorker(name, async () => Bun.sleep(14_000), { heartbeatInterval: 0, lockDuration: 60_000 });
  worker.on('stalled', (id) => stalled.push(id));
  closing({ close: () => worker.close(true) });
  const { id } = await queue.add('silent', {}, { attempts: 5, backoff: 60_000 });
  await eventually(() => stalled.includes(id), 'stalled event', 14_000);
});

finish();
