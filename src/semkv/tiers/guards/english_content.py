"""English content words: opposites, and words that may stand in for each other."""

from __future__ import annotations

from types import MappingProxyType

from semkv.tiers.guards.lexicon import pairs

OPPOSITES = MappingProxyType(
    {
        "modality": pairs(
            """
            required necessary mandatory compulsory obligatory / should ought recommended advised advisable suggested;
            must / recommended advised advisable optional
            """
        ),
        "direction": pairs(
            """
            left leftmost / right rightmost; above over atop upper top up / below under beneath underneath lower bottom
            down; front front_of / behind back rear; ahead / behind; atmost / down; inside within in into indoors /
            outside out outdoors; on onto / off; up / down; upstairs / downstairs; north northern / south southern;
            east eastern / west western; north / east west; south / east west; northeast northwest / southeast
            southwest; northeast / northwest; southeast / southwest; towards toward to / awayfrom away; to / from;
            forward forwards ahead / backward backwards back; uphill / downhill; upper / lower; before / after;
            clockwise / counterclockwise anticlockwise; before after / during while; near / far; inward / outward;
            upward / downward; port / starboard; landscape / portrait; northbound / southbound; eastbound / westbound;
            horizontal / vertical; across / along; ascend / descend; from since / until till; first / last final
            """
        ),
        "antonym": pairs(
            """
            buy purchase acquire / sell; import / export; encrypt encode / decrypt decode; gain / lose; win / lose;
            increase raise rise grow boost up gain / decrease lower fall shrink reduce drop decline down cut lessen;
            maximum max maximize / minimum min minimize; add insert append attach / remove delete subtract detach
            drop; open / close closed shut; start begin launch / stop end finish quit cease terminate; on / off;
            enable / disable; create build construct make / destroy delete demolish; push / pull pop; give / take
            receive; send / receive get; borrow / lend loan; rent lease hire / buy own sell; teach / learn; ask
            question / answer; come arrive / go leave depart; enter entrance / exit leave; hire recruit employ / fire
            dismiss sack; accept approve allow permit / reject refuse deny ban; forbid prohibit ban block / allow
            permit unblock; allowed permitted legal / forbidden banned prohibited illegal; love like / hate dislike;
            remember / forget; win winner victory / loss loser defeat; succeed success / fail failure; pass / fail;
            attack / defend; arrest / release free; attract / repel; expand extend / shrink contract; inhale / exhale;
            join / leave quit; lock / unlock; connect / disconnect; install / uninstall; load / unload; pack / unpack;
            compress zip / decompress expand unzip extract; freeze / thaw melt boil defrost; melt / solidify; wake /
            sleep; strengthen / weaken; lengthen / shorten; widen / narrow; tighten / loosen; harden / soften;
            brighten lighten / darken dim; deepen thicken / thin; sharpen / blunt dull; sink / float; ascend ascending
            climb / descend descending; rise / set; praise compliment / criticize blame insult; reward / punish; build
            / break; fix repair / break damage; save / spend waste; show display reveal / hide conceal; find / lose;
            include contain / exclude; appear / disappear vanish; live / die; marry / divorce; speed accelerate / slow
            brake decelerate; heat warm / cool chill freeze; fill / empty drain; dry / wet moisten; dress wear /
            undress; catch / throw drop miss; lift raise / lower drop; store save / load delete; push / pop; read /
            write; upload / download; upgrade / downgrade; input / output; deposit / withdraw; credit / debit; invest
            / divest; follow / unfollow; mute / unmute; zip / unzip; wrap / unwrap; fold / unfold; tie / untie; plug /
            unplug; subscribe / unsubscribe; merge join / split; multiply / divide; add plus / subtract minus; sum /
            difference; asset / liability; profit / loss; income revenue / expense; pros pro advantage benefit upside
            / cons con disadvantage drawback downside; strength / weakness; positive / negative; hot warm / cold cool;
            rich wealthy / poor; happy glad cheerful / sad unhappy; easy simple / hard difficult complex; strong /
            weak; fast quick rapid / slow; quickly / slowly; big large huge / small little tiny; tall high long /
            short low; wide broad / narrow; thick fat / thin skinny slim; deep / shallow; heavy / light; bright light
            / dark dim; hard / soft; wet / dry; clean / dirty; full / empty; loud noisy / quiet silent; rough /
            smooth; sharp / blunt dull; tight / loose; fresh / stale rotten; sweet / sour bitter; good great / bad
            poor evil; best / worst; better / worse; new modern / old ancient; young / old elderly; early / late;
            alive living / dead; safe secure / dangerous unsafe risky harmful; healthy / sick ill unhealthy; true /
            false; right correct / wrong incorrect; cheap / expensive; public / private; internal / external; inner /
            outer; domestic national / foreign international; local / global remote; major / minor; male / female; man
            / woman; boy / girl; men / women; husband / wife; father dad / mother mom; son / daughter; brother /
            sister; king / queen; uncle / aunt; nephew / niece; actor / actress; parent / child; teacher / student
            pupil; doctor / patient nurse; employer boss / employee worker; buyer / seller; landlord / tenant; winner
            / loser; friend / enemy; host / guest; client / server; predator / prey; lender / borrower; sender /
            receiver recipient; question / answer; cause / effect; problem / solution; urban / rural; city / country
            village; land / sea; day / night; sun / moon; summer / winter; hot / cold; heaven / hell; peace / war;
            temporary / permanent; static / dynamic; active / passive inactive; mutable / immutable; serial sequential
            / parallel; synchronous / asynchronous; ascending / descending; vertical vertically / horizontal
            horizontally; clockwise / counterclockwise anticlockwise; odd / even; theory theoretical / practice
            practical; abstract / concrete; absolute / relative; simple / complex; general / specific; rare / common;
            optimist optimistic / pessimist pessimistic; introvert / extrovert; liberal / conservative; guilty /
            innocent; brave / cowardly; polite / rude; kind / cruel; honest / dishonest lying; generous / selfish
            stingy; humble modest / arrogant proud; lazy / hardworking; beautiful pretty handsome / ugly; smart clever
            intelligent / stupid dumb; boring dull / interesting exciting; tired / energetic; single / married;
            singular / plural; solid / liquid gas; acid acidic / alkaline base; raw / cooked; ripe / unripe; alive /
            dead; present / absent past future; past / future; birth born / death dead die; begin beginning start /
            end ending finish; front / back rear; wholesale / retail; supply / demand; manual / automatic; analog /
            digital; hardware / software; online / offline; wired / wireless; breakfast / dinner lunch; lunch /
            dinner; formal / informal casual; professional / amateur; expert / beginner novice; prefix / suffix;
            majority / minority; superior / inferior; ally / enemy; virtue / vice; immigrate / emigrate; immigrant /
            emigrant; hire / fire; own possess / sell lose;
            look / seek care; call / cancel; give / quit; put / postpone; carry / perform;
            debit / credit; bull bullish / bear bearish; long / short; organic / synthetic
            artificial; natural / artificial; mandatory required compulsory / optional voluntary; deductive /
            inductive; qualitative / quantitative; implicit / explicit; encourage / discourage; agree / disagree; obey
            / disobey; believe / doubt; trust / distrust; respect / disrespect; laugh smile / cry frown; cheap / dear;
            sunny / rainy cloudy; cloudy / clear; calm / stormy nervous anxious; relaxed / tense stressed; awake /
            asleep; visible / invisible hidden; edible / inedible poisonous; drunk / sober; straight / curved crooked
            bent; flat / bumpy steep; blunt / sharp; forward / reverse backward; top / bottom; start / finish; whole /
            part; everything all / nothing; wax / wane; ebb / flow; approve / veto; light / heavy; mild / severe
            spicy; acute / chronic; benign / malignant; gross / net; fixed / variable; open / covered; overt / covert;
            now / later; http / https; off / of; hello hi hey / goodbye bye farewell
            """
        ),
        "comparison": pairs(
            """
            larger bigger greater / smaller lesser; more most / less least fewer fewest; higher taller / lower shorter;
            longer / shorter; largest biggest greatest / smallest least; highest tallest / smallest lowest shortest;
            longest / shortest; older elder / younger newer; oldest eldest / youngest newest; better / worse; best /
            worst; heavier / lighter; heaviest / lightest; faster quicker / slower; fastest quickest / slowest; hotter
            warmer / colder cooler; hottest warmest / coldest coolest; richer wealthier / poorer; richest wealthiest /
            poorest; cheaper / dearer; cheapest / dearest; harder / easier softer; hardest / easiest softest; closer
            nearer / farther further; closest nearest / farthest furthest; stronger / weaker; strongest / weakest;
            thicker fatter / thinner slimmer; thickest / thinnest; wider broader / narrower; widest / narrowest; deeper
            / shallower; deepest / shallowest; brighter lighter / darker; brightest / darkest; louder / quieter;
            loudest / quietest; earlier sooner / later; earliest / latest; safer / riskier; safest / riskiest; stricter
            / looser; atleast minimum over above / atmost maximum; over above exceeding / under below; upward /
            downward; greater more over above / fewer less under below; maximum / minimum; max / min; happier / sadder;
            smarter / dumber; cleaner / dirtier; simpler / harder; newer newest / older oldest
            """
        ),
        "quantity": pairs(
            """
            all every always everything everyone everybody each / some someone somebody something sometimes any anyone
            anybody anything never nothing nobody few several
            single rarely seldom most half partly; both / either neither single; always / sometimes usually rarely
            seldom often occasionally never; often frequently / rarely seldom; once / twice thrice daily; many much most
            lot several lots / few little only single; completely fully entirely / partly partially half; whole entire
            / half part partial; double / triple half halve quadruple; dozen / single pair; pair couple / single
            dozen; weekly / daily monthly yearly; daily / monthly yearly hourly; monthly / yearly annually; majority
            most / minority; bit / lot; everywhere / nowhere somewhere; plenty enough / little few lack; single /
            multiple double; one / all both many several
            """
        ),
    }
)

_SYNONYMS = """
fix repair mend solve resolve correct troubleshoot; buy purchase get acquire order; begin start commence launch; big
large huge great; biggest largest greatest; bigger larger greater; small little tiny; fast quick rapid speedy quickly;
faster quicker; fastest quickest; delete remove erase clear eliminate uninstall; create make build generate develop
construct write produce form; write compose draft author create; car automobile vehicle; bike bicycle cycle; movie
film; photo picture image photograph pic; job work career employment position occupation; child kid children kids;
mother mom mum; father dad; doctor physician; sick ill; happy glad; sad unhappy; smart intelligent clever; angry mad;
pretty beautiful; scared afraid frightened; rich wealthy; boring dull; hard difficult tough challenging; easy simple;
wrong incorrect; correct right; cheap inexpensive affordable low-cost cost; expensive costly dear; help assist aid
support; show display present; explain describe clarify tell illustrate; end finish stop conclude; stop quit cease end
halt; choose pick select; earn make get; change alter modify edit update adjust switch convert; increase raise boost
improve grow enhance; decrease reduce lower cut lessen minimize; improve enhance better increase boost develop; rise
increase climb grow; fall drop decline decrease; near close beside nearby next adjacent; often frequently; rarely
seldom; maybe perhaps possibly; require need necessary must want; use utilize employ apply using; allow permit let
legal; forbid prohibit ban; keep retain maintain; try attempt; show demonstrate; talk speak chat converse; say tell
state; ask inquire request; answer reply respond response; see view watch look; watch see; look appear seem; find
locate discover search; search find look seek; error bug issue problem fault mistake trouble; problem issue trouble
difficulty; website site webpage; internet web online; phone smartphone cellphone telephone mobile cell; laptop
notebook; computer pc; tv television; fridge refrigerator; sofa couch; trash garbage rubbish waste; store shop market;
apartment flat; house home; street road; city town; country nation; company firm business corporation; boss manager;
worker employee staff; customer client; person human individual; guy man; girl woman lady; boy guy; meal food dish;
dinner supper; candy sweets; cookie biscuit; gas petrol gasoline fuel; truck lorry; elevator lift; vacation holiday
trip; trip journey travel tour; travel go; flight plane; airplane plane aircraft; money cash; salary pay wage income;
price cost fee rate charge; cost price expense; free complimentary; tax taxation; exam test examination quiz; school
college university; grade mark score; teacher instructor tutor professor; student pupil learner; learn study master
understand; teach instruct train; study learn; book novel; article post text; essay paper; story tale; author writer;
sentence phrase; summary overview abstract; summarize shorten condense; list enumerate name; image picture drawing;
draw sketch; translate convert render turn; convert transform change turn transfer; rewrite rephrase reword paraphrase
make; code program script programming; function method routine; folder directory; file document; copy duplicate clone;
move transfer shift relocate; transfer send move; send mail ship deliver submit forward make; delivery shipping
shipment; package parcel; order purchase; return give; refund reimbursement; cancel terminate end stop; subscription
membership plan; account profile; password passcode; login logon; username login; app application; run execute start
launch; open launch start; close shut; crash freeze; slow sluggish; setup configure install; configure set; install
setup; download get; update upgrade; verify check confirm validate; check test verify see; show list; display show
print; print output display; iterate loop; get obtain receive retrieve fetch gain acquire; call invoke phone ring
contact; combine merge join concatenate; join merge combine; split divide separate; begin open; many number amount
count quantity; much amount quantity; calculate compute determine find work; difference distinction; different distinct
another other; same identical equal alike; important significant essential key crucial vital; main primary principal
chief major; reason cause why; cause lead make result trigger create reason; effect impact influence consequence
result; affect impact influence; benefit advantage pro upside; disadvantage drawback con downside; goal aim objective
purpose; purpose goal meaning point use; meaning definition sense; mean signify stand; idea concept thought; way method
approach technique means manner; tip advice suggestion hint trick; example instance sample; type kind sort category;
part piece portion section; place location spot; area region zone; top best; best top good greatest finest ideal; good
great nice excellent fine decent; bad poor terrible awful harmful; famous popular known renowned; common frequent
typical; strange weird odd unusual; normal usual typical; old elderly aged; new recent latest modern; current present
latest recent; quiet silent; loud noisy; safe secure; dangerous unsafe risky hazardous; healthy nutritious; health
wellness; weight fat pounds kilos; lose drop shed burn; loss lose; exercise workout training; medicine medication drug;
illness disease sickness; pain ache hurt; symptom sign; treat cure heal; cure treat remedy treatment; sleep rest; tired
exhausted weary; calm soothe relax; clean wash cleanse; dirty filthy; cook make prepare; prepare ready; ready prepared;
boil cook; eat consume have; drink consume; live reside dwell stay life; life living; die pass death; kill murder;
fight battle; war conflict; win earn; love like adore; like enjoy; hate dislike detest despise; feel sense; believe
think; think feel opinion thought consider; thought view opinion think; know understand learn; understand comprehend
grasp; remember recall; meet encounter; friend buddy pal; marry wed; marriage wedding; husband spouse; wife spouse;
baby infant; kid child; plant grow; grow raise cultivate; weather climate; hot warm; cold cool chilly; wet damp; leak
drip; tap faucet; build construct; construct make; break damage; broken damaged; hurt injure harm; harm damage hurt;
hit strike beat; push press; pull drag; carry bring hold; bring take; give provide offer supply; provide offer give
supply contain; offer provide; receive get obtain; reach arrive get; arrive come reach; arrival arrive; leave depart
exit quit; go travel get; visit see tour; stay remain; wait await; walk stroll; run jog; jump leap; throw toss; catch
grab; hold grip; touch feel; sit seat; stand be; wear dress; clothes clothing outfit; shoe footwear; hat cap; shirt
top; stripe striped; cloud cloudy; sun sunny; color hue shade; shape form; size big; height tall; weight heavy; length
long; distance far; age old; speed fast; depth deep; width wide; population people inhabitants; temperature hot; author
writer wrote write; inventor invent; discover find; discoverer discover; founder founded; invent create; president
leader head; capital city;
win victory; fear afraid scared; marathon race; race run; game match; match game; sport game; song
music track; music song; funny humorous amusing; cry weep; begin onset; final last; first initial; next following
upcoming; previous earlier prior last; recover restore retrieve get; restore recover; reset restore change; reset
recover; turn switch; activate enable; enable activate turn on; disable deactivate turn off; connect link pair attach;
pair connect; link connect url; disconnect drop; charge bill; bill invoice; invoice receipt bill; pay payment; payment
pay; rent lease hire; hire employ recruit; fire dismiss; job interview; resume cv; skill ability; ability skill
capability; success succeed successful; succeed success; become be turn; approach handle method; handle manage deal
cope treat; manage handle control; control manage; lead guide; guide tutorial instructions; rule regulation law;
required mandatory compulsory obligatory; law legal; allowed permitted legal okay acceptable possible; possible
feasible able can; able can; unable cannot; likely probable; sure certain; true real correct; false untrue fake; fake
counterfeit; real actual genuine true; exactly precisely; approximately about roughly around; nearly almost; very
extremely really so; also too; only just; book reserve booking reservation; reserve book; seat chair; rank rating; save
store keep; store save keep; save reduce; spend use; fit fits; fitness shape; abroad overseas foreign; foreign
international; international global worldwide; worldwide global world; global world; earth world planet; universe
cosmos world; space universe; daily day; yearly annual annually year; weekly week; monthly month; fall autumn; noon
midday; tonight evening; nowadays today currently; currently now presently; soon shortly; immediately instantly now;
again once; forever always; always forever; proofread check edit review; review evaluate assess; evaluate assess;
compare contrast difference versus; versus vs compare; block ban; remind reminder alert; alarm alert; polite courteous;
plot storyline story; title name headline; name title call; email mail; mail post; message text note; note message;
chat message talk; contact reach touch; agent representative; representative agent; warranty guarantee; damage harm;
item product; product item goods thing; goods product; screen display monitor; dark night; light lamp; lamp light; rug
carpet; carpet rug; stain spot mark; alter change; say spell pronounce; pronounce say; spoken speaking speak verbal
communication; speak talk; fluent fluently; vocabulary words; word term; term word; resolve settle; settle resolve;
gift present; present gift; party celebration; wish want desire; hope wish; dream wish; plan schedule; schedule plan
timetable; meeting appointment; event occasion happening; happen occur; occur happen take; exist be; contain include
have hold; include contain; consist comprise contain made; prevent avoid stop; avoid prevent; protect defend guard
secure; protection security; security safety; safety security safe; danger risk; risk danger; dispute conflict; agree
accept; accept take; refuse decline reject; verify confirm; prove show; evidence proof; proof evidence; research study;
scientist researcher; invest investment; stock share; share stock; profit gain; gain get obtain; growth grow increase;
consumption use usage; usage use; fuel gas petrol; strengthen strong stronger; speed accelerate; accelerate speed;
shorten cut reduce; strong powerful; powerful strong; weak feeble; quality standard; excellent great outstanding;
perfect ideal; ideal perfect best; favorite best preferred; prefer like; interesting fascinating exciting; earn income;
figure number; demonetize ban; layperson layman; beginner novice newbie; novice beginner; expert professional
specialist; professional expert; prisoner inmate; soldier troops; to into onto toward towards; in inside within at; on
upon onto; by via through; with using; for to; army military; police cop; lawyer attorney; thief robber burglar; steal
rob; crime offense; work operate function; mind-blowing amazing; benefit advantage; refund reimburse repay
reimbursement repayment; taxi cab; flu influenza; bike bicycle cycle cycling; illegal unlawful forbidden; former old
previous ex; auto automatic automatically; weight heavy weigh; speed fast quick; size large big; amazing unknown
interesting surprising incredible awesome cool fascinating; stomach belly tummy abdomen; headache migraine; shot
injection jab vaccination vaccine; doctor gp; chemist pharmacy drugstore; pharmacist chemist; vomit puke; allergy
allergic; contagious infectious catching; pregnant expecting; pregnancy expecting; surgery operation; tooth dental
dentist; glasses spectacles; sunglasses shades; jumper sweater pullover; trainers sneakers; trainer sneaker; nappy
diaper; pram stroller; pavement sidewalk; motorway highway freeway; crossroads intersection junction; roundabout
rotary; boot trunk; bonnet hood; windscreen windshield; tyre tire; lorry truck; underground subway metro tube; tram
streetcar; coach bus; railway railroad train; station stop; luggage baggage suitcase; timetable schedule; queue line;
holiday vacation; autumn fall; cinema theater; telly tv; advert ad advertisement commercial; newspaper paper; post
mail; postcode zip zipcode; parcel package; flat apartment; lodger tenant renter; landlord owner; rent rental; garden
yard; rubbish trash garbage litter; bin trashcan; hoover vacuum; cooker stove; hob stove; torch flashlight; plug socket
outlet; biscuit cookie; sweets candy; aubergine eggplant; courgette zucchini; coriander cilantro; prawn shrimp; cutlery
silverware; recipe dish; chop cut slice dice; stir mix; mix blend combine; peel skin; vegetarian veggie; maths
mathematics math; differentiate derivative; integrate integral; factorise factor factorize; multiply times product;
divide quotient; add plus sum; subtract minus; figure digit number; shape figure; graph chart plot diagram; curve
graph; bug defect; crash hang freeze; programmer developer coder; software program application; delete erase wipe; wifi
wireless; logout signout; password passphrase; picture pic snap photo; screenshot screengrab; select choose pick; click
tap; charger adapter; quicken accelerate; shrink reduce; enlarge increase; alter amend; amend edit; begin commence;
finish complete; complete fill; assess judge; allow enable; forbid disallow; buy get obtain; purchase acquisition;
discount reduction; bargain deal; cheap budget; receipt invoice; bankrupt insolvent; salary earnings; retire
retirement; quit resign leave; resign resignation; redundant dismissed; colleague coworker; boss supervisor; staff
personnel; apply application; cover include insure; insure insurance; claim request; lawsuit case; court tribunal; jail
prison; sentence punishment; fine penalty; penalty punishment; murderer killer; robbery theft; steal theft; vote elect
election; election vote; law act statute; contract agreement; agreement deal; soldier fighter; win defeat beat; defeat
beat conquer; rule reign govern; king monarch; ruler monarch; emperor ruler; founded establish set; establish create;
ancient old; begin originate; originate come; invent devise; kid youngster; pensioner retiree; grandma grandmother
granny; grandpa grandfather; mum mother; dad father daddy; spouse partner; fiance fiancee; pet animal; rabbit bunny;
insect bug; pig swine; cattle cow; river stream; rain rainfall; earthquake quake; climate weather; soil earth ground
dirt; mend repair; glue adhesive; stink smell; taste flavor flavour; loud noise; noise sound; quiet calm; bright vivid;
shade shadow; huge enormous gigantic massive; tiny minute; broad wide; slim thin slender; fat overweight obese; hungry
starving; tired sleepy; sleep nap; wake awaken; dream nightmare; scared terrified; worry concern; anxious worried
nervous; anxiety worry; depressed sad; joy happiness; anger rage; annoy irritate bother; argue quarrel; argument
quarrel dispute; apologise sorry apology; thank grateful; introduce present; invite ask; arrive land; depart leave;
depart departure; delay late; late delayed; cancel cancellation; book booking; borrow loan; lend loan; owe debt; save
saving savings; spend spending; invest investing; lose losing; chance probability likelihood; likely probability;
possible possibility; necessary needed required; require requirement; permit permission; permission consent; obligatory
required; hurt sore; sore painful; painful pain; itch itchy; swell swollen swelling; bleed bleeding; break fracture;
wound injury; injure injury; infect infection; dose dosage; pill tablet; jog run; swim swimming; bake baking; drive
driving; park parking; sail sailing; fly flight flying; travel trip; rule reign; border frontier; inhabitant resident;
foreigner foreign; translate translation; poem verse; read reading; draft write compose; brief short; short concise;
summary summarise summarize; mention name; describe description; explain explanation; compare comparison; differ
difference differently; estimate guess; measure measurement; increase growth; decrease decline; highest tallest;
nearest closest; newest latest; earliest first; several multiple; entire whole complete; fail failure; attempt try;
avoid evade; escape flee; hide conceal; reveal show; notice see; observe watch; stare look; hear listen; shout yell
scream; reply answer; request ask; order command; obey follow; chase pursue; imprison jail; lift raise; fix attach; tie
bind; shut close; unlock open; wipe clean; rinse wash; scrub clean; stain mark; tidy clean neat; untidy messy; sack
dismiss fire dismissal; football soccer; length long duration; duration last; hit reach; film movie; average mean; max
maximum; min minimum; lowest smallest least; eat eating meal; eat food; soda pop; alcohol booze; trousers pants; net
network; cover travel; hand carry carryon; paracetamol acetaminophen; adrenaline epinephrine; calculate compute
evaluate; cost price expensive; car automobile; parking park; sunrise dawn; sunset dusk; rise raise; sneakers trainers;
treaty agreement; rock stone; forest wood woods; sum total; ticket fare; adult grownup; teenager teen adolescent; smell
odor scent; reservation reserve; seperate separate; grammer grammar; calender calendar; recieve receive; definitely
surely; tumor tumour; prescribe prescription; greet welcome; risk probability; citizen national; fund finance
sponsor; store put; over across; in during; unclog unblock; last keep; hike hiking trek
"""
SYNONYMS = tuple(" ".join(group.split()) for group in _SYNONYMS.split(";"))
