/* READ: one transfer between a producer P and a consumer D, with one fault. See README.md.
 *
 * Time is modelled by its order alone: P's lease may end only after D's has, because D counts from before it asked.
 * A mutation (-DM_...) breaks one rule on purpose; the checker has to find each.
 */
#include "common.pml"

#define PAGES 2

mtype = { none, computing, held, released, expired, failed };
mtype = { waiting, posted, failing, cancelling, published, over };

mtype p = none;
mtype d = waiting;
bool p_valid;          /* P's blocks hold this transfer's pages */
bool p_holds;          /* P's blocks belong to it */
bool parked;           /* an ACK came before the request */
bool d_owns;           /* D's blocks belong to the import */
bool ack_owed, ack_confirmed;
bool foreign;          /* a page was read that P did not hold any more */

/* The one operation: pages land one by one, and then it is terminal. */
bool op_posted, op_fenced, op_terminal, op_error, op_lost;
byte landed;

chan call = [2] of { mtype };     /* gRPC: in order, or not at all */
chan reply = [1] of { mtype };
mtype = { ask, cancel_call, computed, refused };

inline p_free() { p_holds = false; p_valid = false }

active proctype Producer()
{
end:
  do
  :: atomic { !p_dead && call?[ask] -> call?ask;
       if
       :: parked -> p = failed; reply!refused
       :: else -> p = computing
       fi }
  :: atomic { !p_dead && call?[cancel_call] -> call?cancel_call;
       if :: p == computing -> p = failed :: else fi }
  :: atomic { !p_dead && p == computing ->
       if
       :: p = held; p_holds = true; p_valid = true; reply!computed
       :: p = failed; reply!refused
       fi }
  :: atomic { !p_dead && to_p?[ack] -> to_p?ack;
       if
       :: p == none -> parked = true
       :: p == computing -> p = failed
       :: p == held -> p = released; p_free()
       :: else
       fi;
       if :: nfull(to_d) -> to_d!ack_reply :: full(to_d) fi }
  :: atomic { !p_dead && p_lease_over && p == held -> p = expired; p_free() }
  :: atomic { !p_dead && p_lease_over && p == computing -> p = failed }
#ifdef M_REUSE_BEFORE_ACK
  :: atomic { !p_dead && p == held -> p = released; p_free() }
#endif
  od
}

inline end_import(to) { d = to; d_owns = false; ack_owed = true }

active proctype Consumer()
{
  bool client_left = false;
  call!ask;
end:
  do
  :: atomic { !d_dead && d == waiting && reply?[computed] -> reply?computed;
       if
       :: d_lease_over || p_known_dead -> d = over; ack_owed = true
       :: else -> d = posted; d_owns = true; op_posted = true
       fi }
  :: atomic { !d_dead && d == waiting && reply?[refused] -> reply?refused; d = over; ack_owed = true }
  :: atomic { !d_dead && d == waiting && p_known_dead -> d = over; ack_owed = true }
  :: atomic { !d_dead && d == waiting && !client_left && nfull(call) ->
       client_left = true; call!cancel_call; d = over; ack_owed = true }
  :: atomic { !d_dead && d == posted && !client_left -> client_left = true; d = cancelling;
#ifdef M_FREE_AT_CANCEL
       d_owns = false;
#endif
     }
  :: atomic { !d_dead && d == posted && d_lease_over -> d = failing }
  :: atomic { !d_dead && d == posted && op_terminal && !op_lost ->
       if
#ifdef M_PUBLISH_LATE
       :: !op_error -> assert(!foreign); end_import(published)
       :: op_error -> end_import(over)
#else
       :: !op_error && !d_lease_over -> assert(!foreign); end_import(published)
       :: op_error || d_lease_over -> end_import(over)
#endif
       fi }
  :: atomic { !d_dead && (d == failing || d == cancelling) && op_terminal && !op_lost -> end_import(over) }
  /* The deadline passes with the operation still out, or the peer is known dead: fence, and only then let go. */
  :: atomic { !d_dead && (d == posted || d == failing || d == cancelling) && !op_fenced && (op_lost || p_known_dead) ->
       d = failing;
#ifdef M_NO_FENCE
       end_import(over)
#else
       op_fenced = true
#endif
     }
  :: atomic { !d_dead && d == failing && op_fenced -> end_import(over) }
  :: atomic { !d_dead && ack_owed && !ack_confirmed && !ack_sent && nfull(to_p) -> ack_sent = true; to_p!ack }
  :: atomic { !d_dead && to_d?[ack_reply] -> to_d?ack_reply; ack_confirmed = true }
  od
}

active proctype Fabric()
{
end:
  do
  :: atomic { op_posted && !op_fenced && !op_terminal && landed < PAGES ->
       assert(d_owns || d_dead);    /* no byte is written after the blocks' ownership has ended */
       if :: !p_valid -> foreign = true :: else fi;
       landed++ }
  :: atomic { op_posted && !op_fenced && !op_terminal && landed == PAGES -> op_terminal = true }
  /* An error: the rest does not land, and what did is there. */
  :: atomic { fault_left && op_posted && !op_terminal -> fault_left--; op_error = true; op_terminal = true }
  :: atomic { fault_left && op_posted && !op_lost && !op_terminal -> fault_left--; op_lost = true }
  od
}

active proctype Faults()
{
end:
  do
  :: disconnect_or_duplicate()
  :: atomic { fault_left -> fault_left--; p_dead = true; died = true }
  :: atomic { fault_left -> fault_left--; d_dead = true; died = true }
  :: atomic { p_dead && !p_known_dead -> p_known_dead = true }
  /* Silence for as long as a lease: D's ends first. A dead D's lease ends, too. */
  :: atomic { fault_left -> fault_left--; d_lease_over = true; silence = true }
  :: atomic { (d_lease_over || d_dead) && !p_lease_over -> p_lease_over = true }
  od
}

active proctype Judge()
{
  timeout;
  assert(p_dead || !p_holds);                             /* every source block is free */
  assert(d_dead || !d_owns);                              /* every destination block is free, or its request's */
  assert(d_dead || d == published || d == over);          /* each side has one end */
  assert(p_dead || p == released || p == expired || p == failed || p == none);
  assert(died || silence || p != expired);                /* released without waiting for the lease */
  assert(died || silence || !ack_owed || ack_confirmed)
}
